"""Trace: records what an engine does in every step.

    with Trace(llm) as trace:
        llm.generate(prompts, params)
    print(trace)
    trace.save("trace.html")

A trace is the engine's observer and stores the events of events.py. show.py shows them.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nanovllm.cli.trace import show
from nanovllm.cli.trace.events import Event as Event
from nanovllm.cli.trace.events import State as State
from nanovllm.engine.observer import NO_OBSERVER, Observer
from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.token_logprobs import decode_token
from nanovllm.plan import ResultKind, StepOutput

if TYPE_CHECKING:
    from nanovllm.features.tasks.beam_search import Beams
    from nanovllm.features.tasks.results import BeamSearchSequence

# Fields of an event that are left out if they are as before. Other empty fields are left out too,
# except for these.
IF_CHANGED = ("running", "waiting", "decodes", "receivers")
ALWAYS = ("plan", "commit", "time", "chunks", "tokens", "ended")
MAX_LIKELY = 5  # tokens whose probabilities are recorded in addition to the sampled token


@dataclass
class Search:
    """The state of a beam search that a trace keeps. A request drops its own state when it ends."""

    beams: Beams
    # `beams.finished` and `beams.scores` after the last event.
    results: list[tuple[float, Sequence, BeamSearchSequence]]
    scores: dict[Sequence, float]
    num_seqs: int = 0  # sequences that have appeared


class Trace(Observer):
    """Records the steps of an LLM, or of an LLMEngine, while its `with` block runs.

    The trace contains the requests of all threads. An engine has one Trace at a time.
    """

    def __init__(self, llm: Any) -> None:
        """llm: an LLM or an LLMEngine."""
        engine: Any = getattr(llm, "engine", llm)
        if not hasattr(engine, "scheduler"):
            raise TypeError(f"a Trace records an LLM or its LLMEngine, not {llm!r:.80}")
        self._engine = engine
        self._scheduler = scheduler = engine.scheduler
        self._blocks = scheduler.block_manager
        self.options: dict[str, Any] = {
            "num_blocks": self._blocks.num_blocks,
            "block_size": self._blocks.block_size,
            "max_num_batched_tokens": scheduler.token_budget,
            "max_num_seqs": scheduler.max_num_seqs,
            "policy": str(getattr(scheduler.policy_key, "__name__", "")).replace("_", " "),
            "async_scheduling": engine.async_scheduling,
            "num_host_blocks": getattr(self._blocks, "num_host_blocks", 0),
        }
        self.events: list[Event] = []
        self.num_steps = 0
        self._state = State()  # after all events
        self._numbers: dict[Any, int] = {}  # sequence -> its number
        self._preemptions: dict[Sequence, int] = {}  # of the unfinished sequences
        self._searches: dict[int, Search] = {}  # arrival -> beam search
        self._in_flight: deque[int] = deque()  # steps; 0 for one that was planned before the trace
        self._start = self._begun = 0.0

    def __enter__(self) -> Trace:
        with self._engine.lock:
            if self.events:
                raise RuntimeError("this Trace has been used; create another with Trace(llm)")
            if self._engine.observer is not NO_OBSERVER:
                raise RuntimeError("the engine has a Trace already; leave its `with` block first")
            self._engine.observer = self
            self._start = time.perf_counter()
            self._in_flight.extend(0 for _ in self._scheduler.in_flight)
            self._add(self._changes())
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        with self._engine.lock:
            self._engine.observer = NO_OBSERVER
            self._add(self._changes() | Event(ended=describe(error)))

    # ---- the engine's observer ----

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def scheduled(self, step: InFlightStep | None) -> None:
        if step is None and not self._in_flight:
            return  # nothing was planned, and nothing will be committed
        self.num_steps += 1
        event = self._changes() | Event(plan=self.num_steps, chunks=[], decodes=[])
        if step is not None:
            plan, seqs = step.plan, step.seqs
            numbers = {row: self._numbers[seq] for row, seq in seqs.items()}
            running = {seq.row: self._numbers[seq] for seq in self._scheduler.running}
            event |= Event(
                chunks=[[numbers[c.row], c.start, len(c.token_ids)] for c in plan.chunks],
                decodes=[numbers[row] for row in plan.decode_rows],
                new_rows=[numbers[new.row] for new in plan.new_rows],
                copies=list(plan.block_copies),
                states_read=[(source, running[row]) for source, row in plan.state_copies],
                states_saved=[
                    (numbers[row], seqs[row].num_computed - tokens_after, slot)
                    for row, tokens_after, slot in plan.state_saves
                ],
                saved=list(plan.saves),
                loaded=list(plan.loads),
                host=self._blocks.stats() if plan.saves or plan.loads else {},
                evicted=step.evicted,
            )
            self._in_flight.append(self.num_steps)
        self._add(event | Event(why=self._scheduler.why_waiting))
        self.events[-1]["time"] = self._micros(time.perf_counter())

    def committed(self, step: InFlightStep, updated: list[Sequence], output: StepOutput) -> None:
        event = self._changes()
        # A beam gets its token when the other beams have results, and some beams get none.
        known = self._state.seqs
        got = []
        for seq in self._preemptions:
            number = self._numbers[seq]
            got += [(number, token) for token in seq.token_ids[len(known[number].tokens) :]]
            if seq.finish_reason == "error" and seq in updated:
                got.append((number, -1))
        receivers = [number for number, _ in got]
        counts = Counter(receivers)
        sampled = [self._numbers[seq] for seq in step.sampling_seqs if seq in self._numbers]
        event |= Event(
            commit=self._in_flight.popleft(),
            time=self._micros(self._begun),
            tokens=[token for _, token in got],
            receivers=receivers,
            likely=list(self._likely(step, output, counts)),
            dropped=[number for number in dict.fromkeys(sampled) if number not in counts],
            drafts=[
                (number, chunk.num_drafts, counts[number] - 1)
                for chunk in step.plan.chunks
                if (number := self._numbers.get(step.seqs[chunk.row], -1)) in counts
                if chunk.num_drafts
            ],
            results=list(self._results()),
        )
        self._add(event)

    def _likely(
        self, step: InFlightStep, output: StepOutput, counts: Counter[int]
    ) -> Iterator[tuple[int, int, list[tuple[int, float]]]]:
        """Yield `Event.likely`. `counts` has the number of tokens that each sequence got.

        Probabilities have four digits to keep the trace small.
        """
        for row, seq in step.seqs.items():
            number = self._numbers.get(seq, -1)
            logprobs = output.results[row].logprobs if row in output.results else []
            for sampled, *others in logprobs[: counts[number]]:
                if sampled[0] < 0:
                    continue
                others = [entry for entry in others if entry[0] != sampled[0]][:MAX_LIKELY]
                likely = [(t, float(f"{math.exp(p):.4g}")) for t, p, _ in (sampled, *others)]
                yield number, sampled[2], likely

    def _results(self) -> Iterator[tuple[int, int, float, str]]:
        """Yield `Event.results`."""
        for search in self._searches.values():
            for entry in search.beams.finished:
                if entry not in search.results:
                    normalized, beam, result = entry
                    token = result.stop_reason  # which may be missing in `result.tokens`
                    last = token if isinstance(token, int) else result.tokens[-1]
                    reason = result.finish_reason or ""
                    yield self._numbers[beam], last, round(normalized, 4), reason
            search.results = list(search.beams.finished)

    def reverted(self, error: BaseException) -> None:
        self._in_flight.clear()
        self._add(self._changes() | Event(failed=describe(error)))

    def _micros(self, seconds: float) -> int:
        return round((seconds - self._start) * 1e6)

    def _changes(self) -> Event:
        """Return the differences between the engine and the state after the last event."""
        scheduler = self._scheduler
        blocks = self._blocks
        state = self._state
        numbers = self._numbers
        before = self._preemptions
        queue = list(scheduler.waiting)
        unknown = [seq for seq in (*scheduler.running, *queue) if seq not in numbers]
        for seq in sorted(unknown, key=lambda seq: (seq.arrival, seq.index)):
            numbers[seq] = len(numbers)
        new = {seq: self._name(seq) for seq in islice(numbers, len(state.seqs), None)}
        tables = []
        for seq in (*before, *new):
            number = numbers[seq]
            table = seq.block_table
            old_table = state.seqs[number].table if number < len(state.seqs) else []
            if table != old_table:
                keep = sum(takewhile(bool, map(eq, old_table, table)))
                tables.append([number, keep, *table[keep:]])
        in_cache = {block.block_id for block in blocks.hash_to_block.values()}
        host_blocks = getattr(blocks, "hash_to_host_block", {}).values()  # only of a host cache
        scores = []
        for search in self._searches.values():
            if search.scores is not search.beams.scores:
                search.scores = search.beams.scores
                scores += [(numbers[seq], round(score, 4)) for seq, score in search.scores.items()]
        ended = [seq for seq in before if seq.status is Status.FINISHED]
        return Event(
            new=[
                (name, s.num_prompt, list(s.token_ids), s.num_computed, numbers.get(s.parent, -1))
                for s, name in new.items()
            ],
            running=[numbers[seq] for seq in scheduler.running],
            waiting=[numbers[seq] for seq in queue],
            tables=tables,
            cached=sorted(state.cached ^ in_cache),
            host_cached=sorted(state.host_cached ^ {block.block_id for block in host_blocks}),
            scores=scores,
            preempted=[numbers[seq] for seq, count in before.items() if seq.preemptions > count],
            finished=[(numbers[s], s.finish_reason or "", s.stop_reason) for s in ended],
        )

    def _name(self, seq: Sequence) -> str:
        """Return the id of the request, with a number if it can have several sequences.

        The number is the index of a sample. The index of a beam changes, so beams are numbered in
        the order in which they appear.
        """
        if seq.result_kind is ResultKind.CANDIDATES:
            if seq.arrival not in self._searches:
                beams = seq.request.state
                self._searches[seq.arrival] = Search(beams, list(beams.finished), {})
            search = self._searches[seq.arrival]
            search.num_seqs += 1
            return f"{seq.request_id}.{search.num_seqs - 1}"
        return f"{seq.request_id}.{seq.index}" if seq.forks or seq.parent else seq.request_id

    def _add(self, event: Event) -> None:
        """Append an event, and update the state with which the next event is compared."""
        fields = {
            name: value
            for name, value in event.items()
            if (value != getattr(self._state, name) if name in IF_CHANGED else value)
            or name in ALWAYS
        }
        event = cast("Event", fields)
        live = [*self._preemptions, *islice(self._numbers, len(self._state.seqs), None)]
        self.events.append(event)
        self._state.apply(event)
        self._preemptions = {s: s.preemptions for s in live if s.status is not Status.FINISHED}

    # ---- the events as a table and as a page ----

    def texts(self) -> dict[int, str]:
        """Return the text of each token in the trace; empty without a tokenizer."""
        if (tokenizer := self._engine.input_processor.tokenizer) is None:
            return {}
        known = {t for event in self.events for _, _, ids, *_ in event.get("new", ()) for t in ids}
        known |= {token for event in self.events for token in event.get("tokens", ())} - {-1}
        likely = (entry for event in self.events for entry in event.get("likely", ()))
        known |= {token for *_, pairs in likely for token, _ in pairs}
        known |= {token for event in self.events for _, token, *_ in event.get("results", ())}
        return {token: decode_token(tokenizer, token, []) or "\ufffd" for token in sorted(known)}

    def save(self, path: str | Path) -> None:
        """Write a page for a browser."""
        if not self.num_steps:
            raise RuntimeError("the trace is empty; call llm.generate inside `with Trace(llm)`")
        with self._engine.lock:
            page = show.page(self.options, self.events, self.texts())
            Path(path).write_text(page, encoding="utf-8")

    def __str__(self) -> str:
        return show.table(self.options, self.events, self.texts())


def describe(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}".rstrip(": ")
