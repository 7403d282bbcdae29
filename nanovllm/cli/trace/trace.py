"""Trace: records what an engine does in every step.

    with Trace(llm) as trace:
        llm.generate(prompts, params)
    print(trace)
    trace.save("trace.html")

A trace is the engine's observer. It stores the events of events.py, which are dicts with the
changes since the previous event. show.py shows them as a table and as a page.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.cli.trace import show
from nanovllm.cli.trace.events import Event as Event
from nanovllm.cli.trace.events import State as State
from nanovllm.engine.observer import NO_OBSERVER, Observer
from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.features.requests.logit_rules.sampling import decode_token
from nanovllm.plan import ResultKind, StepOutput

if TYPE_CHECKING:
    from nanovllm.features.requests.beam_search import Beams, BeamSearchSequence

MAX_LIKELY = 5  # tokens whose probabilities are recorded in addition to the sampled token


@dataclass
class Search:
    """The state of a beam search that a trace keeps. A request drops its own state when it ends."""

    beams: Beams
    results: list[tuple[float, BeamSearchSequence]]  # `beams.finished` after the last event
    scores: dict[Sequence, float]  # `beams.scores` after the last event
    num_seqs: int = 0  # sequences that have appeared


class Trace(Observer):
    """Records the steps of an LLM, or of an LLMEngine, while its `with` block runs.

    The trace contains the requests of all threads. An engine has one Trace at a time, and a Trace
    has one `with` block. It can be printed and saved at any time, also after an error.
    """

    def __init__(self, llm: Any) -> None:
        """llm: an LLM, an LLMEngine, or another object with these attributes of an LLMEngine:
        scheduler, tokenizer, async_scheduling, observer and lock.
        """
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
        self._numbers: dict[Sequence, int] = {}
        self._preemptions: dict[Sequence, int] = {}  # of the unfinished sequences
        self._searches: dict[int, Search] = {}  # arrival -> beam search
        self._in_flight: deque[int] = deque()  # steps; 0 for one that was planned before the trace
        self._start = self._begun = 0.0

    def __enter__(self) -> Trace:
        with self._engine.lock:
            if self.events:
                raise RuntimeError("this Trace has been used; create another with Trace(llm)")
            if self._engine.observer is not NO_OBSERVER:
                raise RuntimeError(
                    "the engine has a Trace already; leave its `with` block before the next one"
                )
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
        number = self.num_steps + 1
        event = self._changes()
        event |= Event(plan=number, chunks=[])
        decodes: list[int] = []
        if step is not None:
            plan = step.plan
            numbers = {row: self._numbers[seq] for row, seq in step.seqs.items()}
            decodes = [numbers[row] for row in plan.decode_rows]
            event["chunks"] = [[numbers[c.row], c.start, len(c.token_ids)] for c in plan.chunks]
            if plan.new_rows:
                event["new_rows"] = [numbers[new.row] for new in plan.new_rows]
            if plan.block_copies:
                event["copies"] = list(plan.block_copies)
            if plan.state_copies:
                rows = {seq.row: self._numbers[seq] for seq in self._scheduler.running}
                event["states_read"] = [(source, rows[row]) for source, row in plan.state_copies]
            if plan.state_saves:
                event["states_saved"] = [
                    (numbers[row], step.seqs[row].num_computed - tokens_after, slot)
                    for row, tokens_after, slot in plan.state_saves
                ]
            if plan.saves or plan.loads:
                event["saved"] = list(plan.saves)
                event["loaded"] = list(plan.loads)
                event["host"] = self._blocks.stats()
            if step.evicted:
                event["evicted"] = step.evicted
            self._in_flight.append(number)
        if decodes != self._state.decodes:
            event["decodes"] = decodes
        if self._scheduler.why_waiting:
            event["why"] = self._scheduler.why_waiting
        self.num_steps = number
        self._add(event)
        self.events[-1]["time"] = self._micros(time.perf_counter())

    def committed(self, step: InFlightStep, updated: list[Sequence], output: StepOutput) -> None:
        event = self._changes()
        event |= Event(commit=self._in_flight.popleft(), time=self._micros(self._begun))
        # A beam gets its token when the other beams have results, and some beams get none.
        known = self._state.seqs
        got = [
            (number, -1 if seq.finish_reason == "error" else seq.token_ids[-1])
            for seq in self._preemptions
            if len(seq.token_ids) > len(known[number := self._numbers[seq]].tokens)
            or (seq.finish_reason == "error" and seq in updated)
        ]
        event["tokens"] = [token for _, token in got]
        receivers = [number for number, _ in got]
        if receivers != self._state.receivers:
            event["receivers"] = receivers
        if likely := list(self._likely(step, output, receivers)):
            event["likely"] = likely
        sampled = [self._numbers[seq] for seq in step.sampling_seqs if seq in self._numbers]
        if dropped := [number for number in sampled if number not in receivers]:
            event["dropped"] = dropped
        if results := list(self._results(updated)):
            event["results"] = results
        self._add(event)

    def _likely(
        self, step: InFlightStep, output: StepOutput, receivers: list[int]
    ) -> Iterator[tuple[int, int, list[tuple[int, float]]]]:
        """Yield `Event.likely`. Probabilities have four digits to keep the trace small."""
        for row, seq in step.seqs.items():
            number = self._numbers.get(seq, -1)
            logprobs = output.results[row].logprobs if row in output.results else []
            if logprobs and number in receivers and logprobs[0][0] >= 0:
                sampled, *others = logprobs
                others = [entry for entry in others if entry[0] != sampled[0]][:MAX_LIKELY]
                likely = [(t, float(f"{math.exp(p):.4g}")) for t, p, _ in (sampled, *others)]
                yield number, sampled[2], likely

    def _results(self, updated: list[Sequence]) -> Iterator[tuple[int, int, float, str]]:
        """Yield `Event.results`."""
        for arrival in {seq.arrival: None for seq in updated if seq.arrival in self._searches}:
            search = self._searches[arrival]
            # The beams before this commit. Their outputs differ and are equally long.
            beams = [self._numbers[seq] for seq in self._preemptions if seq.arrival == arrival]
            for normalized, result in search.beams.finished:
                if (normalized, result) in search.results:
                    continue
                for number in beams:
                    tokens = self._state.seqs[number].tokens
                    if result.tokens[: len(tokens)] == tokens:
                        # An end-of-sequence token may be missing in `tokens`.
                        token = result.stop_reason
                        last = token if isinstance(token, int) else result.tokens[-1]
                        yield number, last, round(normalized, 4), result.finish_reason or ""
            search.results = list(search.beams.finished)

    def reverted(self, error: BaseException) -> None:
        self._in_flight.clear()
        self._add(self._changes() | Event(failed=describe(error)))

    def _micros(self, seconds: float) -> int:
        return round((seconds - self._start) * 1e6)

    def _changes(self) -> Event:
        """Return the differences between the engine and the state after the last event."""
        scheduler = self._scheduler
        state = self._state
        numbers = self._numbers
        event = Event()
        queue = list(scheduler.waiting)
        unknown = [seq for seq in (*scheduler.running, *queue) if seq not in numbers]
        for seq in sorted(unknown, key=lambda seq: (seq.arrival, seq.index)):
            numbers[seq] = len(numbers)
        if new := list(islice(numbers, len(state.seqs), None)):
            name, parent = self._name, self._parent
            event["new"] = [
                (name(seq), seq.num_prompt, list(seq.token_ids), seq.num_computed, parent(seq))
                for seq in new
            ]
        if (running := [numbers[seq] for seq in scheduler.running]) != state.running:
            event["running"] = running
        if (waiting := [numbers[seq] for seq in queue]) != state.waiting:
            event["waiting"] = waiting
        tables = []
        for seq in (*self._preemptions, *new):
            number, blocks = numbers[seq], seq.block_table
            old_blocks = state.seqs[number].table if number < len(state.seqs) else []
            if blocks != old_blocks:
                keep = sum(takewhile(bool, map(eq, old_blocks, blocks)))
                tables.append([number, keep, *blocks[keep:]])
        if tables:
            event["tables"] = tables
        in_cache = (block.block_id for block in self._blocks.hash_to_block.values())
        if cached := sorted(state.cached.symmetric_difference(in_cache)):
            event["cached"] = cached
        host_blocks = getattr(self._blocks, "hash_to_host_block", {})  # empty without a host cache
        on_host = (block.block_id for block in host_blocks.values())
        if changed := sorted(state.host_cached.symmetric_difference(on_host)):
            event["host_cached"] = changed
        if scores := list(self._scores()):
            event["scores"] = scores
        if preempted := [numbers[s] for s, n in self._preemptions.items() if s.preemptions > n]:
            event["preempted"] = preempted
        if ended := [seq for seq in self._preemptions if seq.status is Status.FINISHED]:
            event["finished"] = [(numbers[s], s.finish_reason or "", s.stop_reason) for s in ended]
        return event

    def _scores(self) -> Iterator[tuple[int, float]]:
        """Yield `Event.scores`, of all beams of the searches that have chosen beams."""
        for search in self._searches.values():
            if search.scores is not search.beams.scores:
                search.scores = search.beams.scores
                for seq, score in search.scores.items():
                    yield self._numbers[seq], round(score, 4)

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

    def _parent(self, seq: Sequence) -> int:
        """Return the number of the sequence that `seq` was forked from, or -1."""
        return -1 if seq.parent is None else self._numbers.get(seq.parent, -1)

    def _add(self, event: Event) -> None:
        """Append an event and update the state with which the next event is compared."""
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
        """Write a page for a browser. Raises ValueError if `path` does not end in .html."""
        path = Path(path)
        if path.suffix != ".html":
            raise ValueError(f"a trace is saved as a page: name a file.html, not {path.name!r}")
        if not self.num_steps:
            raise RuntimeError(
                "the trace is empty; call llm.generate inside `with Trace(llm)` first"
            )
        with self._engine.lock:
            page = self.page()
        path.write_text(page, encoding="utf-8")

    def page(self) -> str:
        return show.page(self.options, self.events, self.texts())

    def __str__(self) -> str:
        return show.table(self.options, self.events, self.texts())


def describe(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}".rstrip(": ")
