"""Trace: what an engine did in every step, as a table, as a page and for Perfetto.

    with Trace(llm) as trace:
        llm.generate(prompts, params)
    print(trace)
    trace.save("trace.html")  # or "trace.json"

A trace is the engine's observer. It stores events: dicts that contain what has changed since the
previous event. `State.apply` replays them, and `apply` in trace.html does the same in a browser.

    plan 1, commit 1, plan 2, commit 2, plan 3, ...     a plan begins a step of the trace
    plan 1, plan 2, commit 1, plan 3, commit 2, ...     with async scheduling

Sequences are numbered in the order in which they appear, steps from 1.
"""

from __future__ import annotations

import json
import math
import shutil
import textwrap
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from nanovllm.engine.host_tier import TieredBlockManager
from nanovllm.engine.observer import NO_OBSERVER, Observer
from nanovllm.engine.scheduler import WHY_WAITING, InFlightStep, Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.plan import StepOutput, Yield

if TYPE_CHECKING:
    from nanovllm.llm import LLM

# The first columns of the printed table. Sentences stand below it, from the last of these on.
ROW = "{:>4} {:>4} {:>6} {:>6} {:<8.8}"
HEAD = ("step", "free", "cached", "shared", "request", "computes", "slots", "block table", "token")
INDENT = " " * 24
MOST_LIKELY = 5  # tokens whose probabilities are recorded beside that of a sampled one


class Event(TypedDict, total=False):
    """What changed. If `running`, `waiting`, `decodes` or `of` is missing, it has not changed."""

    # One of these four says what happened.
    plan: int  # the number of the step that was planned
    commit: int  # the step whose tokens were read
    failed: str  # the error that reverted all steps in flight
    ended: str  # the `with` block ended, with this error or ""

    # Microseconds since the trace began. For a plan: the begin and the end of `schedule`, and the
    # launch. For a commit: its begin, when the tokens were read, and its end.
    time: list[int]
    # Sequences: name, prompt tokens, known token ids, computed tokens, parent or -1.
    new: list[tuple[str, int, list[int], int, int]]
    running: list[int]  # in order of admission
    waiting: list[int]  # in the order of the queue
    # Sequence, number of blocks at the start of its block table that stay, the blocks after them.
    tables: list[list[int]]
    cached: list[int]  # blocks that entered or left the prefix cache
    preempted: list[int]
    finished: list[tuple[int, str, int | str | None]]  # sequence, finish_reason, stop_reason

    # For a plan only.
    chunks: list[list[int]]  # sequence, first position, number of tokens
    decodes: list[int]  # sequences
    joins: list[int]
    copies: list[tuple[int, int]]  # blocks (source, target)
    saved: list[tuple[int, int]]  # block, host block
    loaded: list[tuple[int, int]]  # host block, block
    host: dict[str, int]  # if blocks were saved or loaded: the counters of the host tier
    evicted: list[int]
    why: str  # a key of WHY_WAITING

    # For a commit only.
    tokens: list[int]  # -1 if no token could be sampled
    of: list[int]  # the sequences that got these tokens
    # Of those whose request has `logprobs`: the sequence, the rank of its token (1 is the most
    # likely), then (token, probability) of that token and of the most likely other ones.
    likely: list[tuple[int, int, list[tuple[int, float]]]]
    dropped: list[int]  # sequences that had ended before their token was read


@dataclass(slots=True)
class SeqState:
    name: str
    num_prompt: int
    tokens: list[int]  # known token ids
    computed: int  # tokens with KV, after the steps planned so far
    parent: int  # the sequence that it is forked from, or -1
    lost: int = 0  # the largest `computed` that a preemption discarded
    table: list[int] = field(default_factory=list)

    def kind(self, start: int) -> str:
        """Return what a plan computes from position `start` on: "prompt", "decode" or "again"."""
        # If there is output, only its last token has not been computed before.
        has_output = len(self.tokens) > self.num_prompt
        if start >= max(self.num_prompt, len(self.tokens) - 1):
            return "decode"
        return "again" if has_output or start < self.lost else "prompt"


@dataclass(slots=True)
class State:
    """Sequences, queues and blocks after some events."""

    seqs: list[SeqState] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    ran_before: list[int] = field(default_factory=list)  # `running` before the last event
    waiting: list[int] = field(default_factory=list)
    cached: set[int] = field(default_factory=set)
    decodes: list[int] = field(default_factory=list)  # of the last plan
    of: list[int] = field(default_factory=list)  # of the last commit

    def apply(self, event: Event) -> None:
        for name, num_prompt, tokens, computed, parent in event.get("new", ()):
            self.seqs.append(SeqState(name, num_prompt, list(tokens), computed, parent))
        self.ran_before, self.running = self.running, event.get("running", self.running)
        self.waiting = event.get("waiting", self.waiting)
        for number, keep, *blocks in event.get("tables", ()):
            self.seqs[number].table[keep:] = blocks
        self.cached ^= set(event.get("cached", ()))
        for number in event.get("preempted", ()):
            seq = self.seqs[number]
            seq.lost, seq.computed = max(seq.lost, seq.computed), 0
        if "plan" in event:
            self.decodes = event.get("decodes", self.decodes)
            for number in self.decodes:
                self.seqs[number].computed += 1
            for number, start, count in event["chunks"]:
                self.seqs[number].computed = start + count
        if "commit" in event:
            self.of = event.get("of", self.of)
            for number, token in zip(self.of, event["tokens"], strict=True):
                if token >= 0:
                    self.seqs[number].tokens.append(token)

    def pool(self, num_blocks: int) -> tuple[int, int, int]:
        """Return the number of free blocks, of cached ones without an owner, and of shared ones."""
        owners = Counter(block for seq in self.seqs for block in seq.table)
        cached = len(self.cached - owners.keys())
        shared = sum(count > 1 for count in owners.values())
        return num_blocks - len(owners) - cached, cached, shared


class Observable(Protocol):
    """What a Trace needs of an engine. LLMEngine and the histories of lessons/ implement it."""

    scheduler: Scheduler
    tokenizer: Any
    max_in_flight: int
    observer: Observer

    @property
    def lock(self) -> threading.RLock: ...


class Trace(Observer):
    """Records the steps of `llm`, an LLM or its LLMEngine, while its `with` block runs.

    It contains the requests of all threads. An engine has one Trace at a time, and a Trace has one
    `with` block. It can be printed and saved at any time, also after an error.
    """

    def __init__(self, llm: LLM | Observable) -> None:
        engine: Observable = getattr(llm, "engine", llm)  # type: ignore[arg-type]
        self._engine = engine
        self._scheduler = scheduler = engine.scheduler
        self._blocks = scheduler.blocks
        self._policy = str(getattr(scheduler.policy_key, "__name__", "")).replace("_", " ")
        self.options: dict[str, int | str] = {
            "num_blocks": self._blocks.num_blocks,
            "block_size": self._blocks.block_size,
            "max_num_batched_tokens": scheduler.token_budget,
            "max_num_seqs": scheduler.max_num_seqs,
            "policy": self._policy,
            "async_scheduling": engine.max_in_flight,
        }
        self.events: list[Event] = []
        self.num_steps = 0
        self._state = State()  # after all events
        self._numbers: dict[Sequence, int] = {}
        self._preemptions: dict[Sequence, int] = {}  # of the unfinished sequences
        self._beams = Counter[int]()  # arrival of a beam search -> its sequences so far
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
        times = [self._micros(self._begun), self._micros(time.perf_counter())]
        if step is None and not self._in_flight:
            return  # nothing was planned, and nothing will be committed
        number, event = self.num_steps + 1, self._changes()
        event |= Event(plan=number, time=times, chunks=[])
        decodes: list[int] = []
        if step is not None:
            plan = step.plan
            chunked = [self._numbers[seq] for seq in step.chunked]
            first_decode = len(step.sampling_seqs) - len(plan.decode_rows)
            decodes = [self._numbers[seq] for seq in step.sampling_seqs[first_decode:]]
            event["chunks"] = [
                [seq, chunk.start, len(chunk.token_ids)]
                for seq, chunk in zip(chunked, plan.chunks, strict=True)
            ]
            if plan.joins:
                event["joins"] = chunked[-len(plan.joins) :]
            if plan.block_moves:
                event["copies"] = list(plan.block_moves)
            if (plan.saves or plan.loads) and isinstance(self._blocks, TieredBlockManager):
                event["saved"], event["loaded"] = list(plan.saves), list(plan.loads)
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
        self.events[-1]["time"].append(self._micros(time.perf_counter()))

    def committed(self, step: InFlightStep, updated: list[Sequence], output: StepOutput) -> None:
        times = [self._micros(self._begun), self._micros(time.perf_counter())]
        event = self._changes()
        event |= Event(commit=self._in_flight.popleft(), time=times)
        # A beam gets its token when the other beams have results, and some beams get none.
        known = self._state.seqs
        got = [
            (number, -1 if seq.finish_reason == "error" else seq.token_ids[-1])
            for seq in self._preemptions
            if len(seq.token_ids) > len(known[number := self._numbers[seq]].tokens)
            or (seq.finish_reason == "error" and seq in updated)
        ]
        event["tokens"] = [token for _, token in got]
        of = [number for number, _ in got]
        if of != self._state.of:
            event["of"] = of
        if output.logprobs:
            event["likely"] = list(self._likely(step, output, of))
        sampled = [self._numbers[seq] for seq in step.sampling_seqs if seq in self._numbers]
        if dropped := [number for number in sampled if number not in of]:
            event["dropped"] = dropped
        self._add(event)

    def _likely(
        self, step: InFlightStep, output: StepOutput, of: list[int]
    ) -> Iterator[tuple[int, int, list[tuple[int, float]]]]:
        """Yield `Event.likely`, with probabilities of four digits, because a trace should be small."""
        for row, seq in step.sequences().items():
            number = self._numbers.get(seq, -1)
            own, *others = output.logprobs.get(row, [(-1, 0.0, 0)])
            if number in of and own[0] >= 0:
                others = [entry for entry in others if entry[0] != own[0]][:MOST_LIKELY]
                likely = [(t, float(f"{math.exp(p):.4g}")) for t, p, _ in (own, *others)]
                yield number, own[2], likely

    def reverted(self, error: BaseException) -> None:
        self._in_flight.clear()
        self._add(self._changes() | Event(failed=describe(error)))

    def _micros(self, seconds: float) -> int:
        return round((seconds - self._start) * 1e6)

    def _changes(self) -> Event:
        """Return what differs between the engine and the state after the last event."""
        scheduler, state, numbers, event = self._scheduler, self._state, self._numbers, Event()
        queue = [entry[-1] for entry in scheduler.waiting]
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
            before = state.seqs[number].table if number < len(state.seqs) else []
            if blocks != before:
                keep = sum(takewhile(bool, map(eq, before, blocks)))
                tables.append([number, keep, *blocks[keep:]])
        if tables:
            event["tables"] = tables
        if cached := sorted(state.cached.symmetric_difference(self._blocks.prefix_index.values())):
            event["cached"] = cached
        if preempted := [numbers[s] for s, n in self._preemptions.items() if s.preemptions > n]:
            event["preempted"] = preempted
        if ended := [seq for seq in self._preemptions if seq.status is Status.FINISHED]:
            event["finished"] = [(numbers[s], s.finish_reason or "", s.stop_reason) for s in ended]
        return event

    def _name(self, seq: Sequence) -> str:
        """Return the id of the request, with a number if it can have several sequences.

        That is the index of a sample. The index of a beam changes, so beams are numbered as they appear.
        """
        if seq.yields is Yield.CANDIDATES:
            self._beams[seq.arrival] += 1
            return f"{seq.request_id}.{self._beams[seq.arrival] - 1}"
        return f"{seq.request_id}.{seq.index}" if seq.forks or seq.parent else seq.request_id

    def _parent(self, seq: Sequence) -> int:
        """Return the number of the sequence that it is forked from, or -1."""
        if seq.yields is not Yield.CANDIDATES:
            return -1 if seq.parent is None else self._numbers.get(seq.parent, -1)
        # The beam of its request that had all of its tokens but the last.
        for (other, number), known in zip(self._numbers.items(), self._state.seqs, strict=False):
            if other.arrival == seq.arrival and known.tokens == seq.token_ids[:-1]:
                return number
        return -1

    def _add(self, event: Event) -> None:
        """Append an event and update the state with which the next one is compared."""
        live = [*self._preemptions, *islice(self._numbers, len(self._state.seqs), None)]
        self.events.append(event)
        self._state.apply(event)
        self._preemptions = {s: s.preemptions for s in live if s.status is not Status.FINISHED}

    # ---- the events as a table, a page and a Chrome trace ----

    def steps(self) -> Iterator[list[Event]]:
        """Yield the events before the first plan, then those of each step, its plan first."""
        group: list[Event] = []
        for event in list(self.events):
            if "plan" in event:
                yield group
                group = []
            group.append(event)
        yield group

    def texts(self) -> dict[int, str]:
        """Return the text of each token in the trace; empty without a tokenizer."""
        if (tokenizer := self._engine.tokenizer) is None:
            return {}
        known = {t for event in self.events for _, _, ids, *_ in event.get("new", ()) for t in ids}
        known |= {token for event in self.events for token in event.get("tokens", ())} - {-1}
        likely = (entry for event in self.events for entry in event.get("likely", ()))
        known |= {token for *_, pairs in likely for token, _ in pairs}
        return {token: str(tokenizer.decode([token])) for token in sorted(known)}

    def save(self, path: str | Path) -> None:
        """Write a page (.html), or a Chrome trace for ui.perfetto.dev (.json)."""
        path = Path(path)
        if path.suffix not in (".html", ".json"):
            raise ValueError(f"a trace is saved as .html or .json, not as {path.name!r}")
        if not self.num_steps:
            raise RuntimeError(
                "the trace is empty; call llm.generate inside `with Trace(llm)` first"
            )
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path.parent} is not a directory; create it first")
        with self._engine.lock:
            content = self.page() if path.suffix == ".html" else json.dumps(self.chrome())
        path.write_text(content, encoding="utf-8")

    def page(self) -> str:
        state, size, words = State(), self._blocks.block_size, []
        for event in self.events:
            state.apply(event)
            words.append(list(describe_changes(event, state, self._policy, size)))
        texts, events = self.texts(), self.events
        data = {"options": self.options, "texts": texts, "events": events, "words": words}
        # JSON is safe in a script element if it contains no "<".
        text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        return template.replace("TRACE_DATA", text)

    def chrome(self) -> dict[str, Any]:
        """Return the trace in Chrome's Trace Event Format: slices in microseconds and counters.

        A step runs from its launch until its tokens are read. With async scheduling the next step is
        launched before that, so the odd steps and the even steps have one track each.

        Process 2 has a track for each sequence: when it waits, and what each step computes for it.
        Slices of a track must not overlap, so one that would begins when the one before it ends.
        Viewers have a meaning of their own for process 0 and thread 0, which are not used.
        """
        out: list[dict[str, Any]] = []

        def add(ph: str, name: str, ts: int, tid: int = 1, **fields: object) -> None:
            out.append({"ph": ph, "name": name, "ts": ts, "pid": 1, "tid": tid, **fields})

        def mark(ph: str, number: int, name: str, ts: int, **fields: object) -> None:
            add(ph, name, ts, 10 + number, pid=2, **fields)

        def add_to(number: int, name: str, start: int, end: int, **args: object) -> None:
            start, ends[number] = max(start, ends.get(number, 0)), end
            if start < end:
                mark("X", number, name, start, dur=end - start, args=args)

        is_async, state, launches, now = self.options["async_scheduling"], State(), [0], 0
        size = self._blocks.block_size
        ends, since = dict[int, int](), dict[int, int]()  # of each track; of those that wait
        work: dict[int, list[tuple[int, str]]] = {}  # step -> sequences and what it computes
        tracks = ["host", *(["odd steps run", "even steps run"] if is_async else ["steps run"])]
        add("M", "process_name", 0, args={"name": "engine"})
        mark("M", 0, "process_name", 0, args={"name": "requests"})
        for tid, name in enumerate(tracks, 1):
            add("M", "thread_name", 0, tid, args={"name": name})
        texts = self.texts()
        for event in self.events:
            first_new = len(state.seqs)
            state.apply(event)
            for number in range(first_new, len(state.seqs)):
                name = f"request {state.seqs[number].name}"
                mark("M", number, "thread_name", 0, args={"name": name})
                mark("M", number, "thread_sort_index", 0, args={"sort_index": number})
            if "plan" in event:
                (begin, end), now = event["time"][:2], event["time"][-1]
                args = {"chunks": event["chunks"], "decodes": state.decodes}
                add("X", f"schedule {event['plan']}", begin, dur=end - begin, args=args)
                launches.append(now)
                chunks = planned(event, state)
                work[event["plan"]] = [(c[0], describe_work(state, c, size)[0]) for c in chunks]
                free, cached, _ = state.pool(self._blocks.num_blocks)
                add("C", "sequences running", end, args={"count": len(state.running)})
                add("C", "sequences waiting", end, args={"count": len(state.waiting)})
                add("C", "blocks free", end, args={"count": free})
                add("C", "blocks cached", end, args={"count": cached})
            elif "commit" in event:
                step, (read, now) = event["commit"], event["time"]
                launch, tid = launches[step], 3 - step % 2 if is_async else 2
                add("X", f"run {step}", launch, tid, dur=read - launch, args={})
                args = {"tokens": event["tokens"], "sequences": state.of}
                add("X", f"commit {step}", read, dur=now - read, args=args)
                got = {n: texts.get(t, t) for n, t in zip(state.of, event["tokens"], strict=True)}
                for number, what in work.pop(step, ()):
                    add_to(number, what, launch, read, step=step, token=got.get(number))
            elif "failed" in event:
                add("i", "failed", now, s="g", args={"error": event["failed"]})
            waiting = set(state.waiting)
            for number in [n for n in since if n not in waiting or "ended" in event]:
                add_to(number, "waiting", since.pop(number), now)
            for number in waiting - since.keys():
                since[number] = now
            for number in event.get("preempted", ()):
                mark("i", number, "preempted", now, s="t")
            for number, reason, _ in event.get("finished", ()):
                mark("i", number, f"finished ({reason})", now, s="t")
        return {"traceEvents": out, "displayTimeUnit": "ms", "otherData": self.options}

    def __str__(self) -> str:
        o, state, texts, size = self.options, State(), self.texts(), self._blocks.block_size
        width = max(80, min(100, shutil.get_terminal_size((100, 24)).columns))
        indents: Any = {"initial_indent": INDENT, "subsequent_indent": INDENT + "  "}
        lines = [
            f"{plural(self.num_steps, 'step')} of {plural(len(self._state.seqs), 'sequence')}, "
            f"{o['policy']}, {plural(self._blocks.num_blocks, 'block')} of {plural(size, 'token')}",
            f"at most {plural(int(o['max_num_batched_tokens']), 'token')} and "
            f"{plural(int(o['max_num_seqs']), 'sequence')} in a step",
            f"slot of a position = block_table[position // {size}] * {size} + position % {size}",
            *["1: 'x' in a later step is a token of step 1"] * (self._engine.max_in_flight > 0),
            "",
            table_row(HEAD, width),
        ]
        for group in self.steps():
            step, rows, notes = [""] * 4, dict[int, list[str]](), list[str]()
            for event in group:
                state.apply(event)
                if "plan" in event:
                    step = [str(n) for n in (event["plan"], *state.pool(self._blocks.num_blocks))]
                    rows = {number: ["nothing", "", "", ""] for number in state.running}
                    for chunk in planned(event, state):
                        rows[chunk[0]] = describe_work(state, chunk, size)
                for number, token in zip(state.of, event.get("tokens", ()), strict=False):
                    text = repr(texts[token]) if token in texts else str(token)
                    late = f"{event['commit']}: " if step[0] != str(event["commit"]) else ""
                    rows.setdefault(number, [""] * 4)[3] = late + text
                notes += describe_changes(event, state, self._policy, size)
            for number, row in rows.items():
                lines.append(table_row((*step, state.seqs[number].name, *row), width))
                step = [""] * 4
            for note in notes:
                lines += textwrap.wrap(note, width, **indents)
        return "\n".join(lines)


def describe(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}".rstrip(": ")


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def some(names: list[str], most: int = 8) -> str:
    """Join names, of which a large trace can have hundreds."""
    more = [f"{len(names) - most} more"] if len(names) > most + 1 else []
    names = names[:most] + more if more else names
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def block_list(blocks: list[int]) -> str:
    return f"block{'s' * (len(blocks) > 1)} {', '.join(map(str, blocks))}"


def last_words(text: str, width: int) -> str:
    """Shorten a line at its beginning, because a step works on the last blocks and slots."""
    return textwrap.shorten(text[::-1], width, placeholder=" …")[::-1]


def table_row(cells: tuple[str, ...], width: int) -> str:
    """Join the cells of a line of 80 to 100 columns."""
    more, (*left, what, slots, blocks, token) = width - 80, cells
    slots, blocks = last_words(slots, 9 + more // 4), last_words(blocks, 11 + more * 3 // 10)
    line = f"{what:<{13 + more // 5}} {slots:<{9 + more // 4}} {blocks:<{11 + more * 3 // 10}} "
    return (ROW.format(*left) + " " + line + token)[:width].rstrip()


def planned(plan: Event, state: State) -> list[list[int]]:
    """Return the chunks and the decodes of a plan: sequence, first position, number of tokens."""
    return plan["chunks"] + [[i, state.seqs[i].computed - 1, 1] for i in state.decodes]


def describe_work(state: State, chunk: list[int], size: int) -> list[str]:
    """Return the table's cells for what `planned` returns: computes, slots, block table, token."""
    number, start, count = chunk
    seq, end, kind = state.seqs[number], start + count, state.seqs[number].kind(start)
    what = f"{kind} {start}" + f"-{end - 1}" * (kind != "decode")
    # A faulty scheduler may plan positions without a block; see lessons/break_it.py.
    ranges: list[list[int]] = []
    for position in range(start, min(end, len(seq.table) * size)):
        slot = seq.table[position // size] * size + position % size
        if ranges and ranges[-1][1] == slot - 1:
            ranges[-1][1] = slot
        else:
            ranges.append([slot, slot])
    slots = " ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return [what, slots, " ".join(map(str, seq.table)), ""]


def describe_changes(event: Event, state: State, policy: str, size: int) -> Iterator[str]:
    """Yield a sentence for each change of an event, with its rule. `state` is the state after it."""
    names = [f"request {seq.name}" for seq in state.seqs]
    for i in event.get("preempted", ()):
        before, why = state.ran_before, "no block was available and it was admitted last"
        later = before[before.index(i) + 1 :] if i in before else []
        if still := [names[j] for j in later if j in state.running]:
            why = f"no block was available (admitted after it and still running: {some(still)})"
        if "failed" in event:
            why = "the step failed"
        yield f"Preemption: {names[i]} returns to the head of the queue, because {why}."
    for seq in state.seqs[len(state.seqs) - len(event.get("new", ())) :]:
        if seq.parent >= 0 and "commit" in event:
            yield f"Fork: request {seq.name} continues {names[seq.parent]}."
    admitted: dict[str, list[str]] = {}
    for i in event.get("joins", ()):
        is_head = state.seqs[i].lost or state.seqs[i].parent >= 0
        rule = "preempted sequences and forks come first" if is_head else policy
        admitted.setdefault(rule, []).append(names[i])
    for rule, admitted_names in admitted.items():
        yield f"Admission: {some(admitted_names)} from the head of the queue ({rule})."
    for i, start, count in event.get("chunks", ()):
        seq, left = state.seqs[i], len(state.seqs[i].tokens) - start
        if i in event.get("joins", ()):
            if seq.parent >= 0 and not seq.lost and left == 1:
                if start < seq.num_prompt:
                    both = f"{names[i]} shares the prompt's blocks with {names[seq.parent]}"
                    yield f"Fork: {both} and computes only the last prompt token again."
            elif start:
                blocks = block_list(seq.table[: start // size])
                yield f"Prefix hit: positions 0-{start - 1} of {names[i]} are cached ({blocks})."
        if count < left:
            yield f"Token budget: {names[i]} computes {count} of the {left} tokens that are left."
    if copies := event.get("copies"):
        pairs = ", ".join(f"{source} to {target}" for source, target in copies)
        yield f"Copy-on-write: block {pairs}, because the block to write is shared or cached."
    if evicted := event.get("evicted"):
        yield f"Eviction: no block was free, so the prefix cache lost {block_list(evicted)}."
    if host := event.get("host"):
        moves = [f"block {block} is saved to host block {to}" for block, to in event["saved"]]
        moves += [f"block {block} is loaded from host block {of}" for of, block in event["loaded"]]
        yield (
            f"Host memory: before the step computes, {', '.join(moves)}. It holds "
            f"{plural(host['host_blocks'], 'block')}, has lost {host['host_evictions']}, and has "
            f"spared {plural(host['host_spared_tokens'], 'token')}."
        )
    if "why" in event:
        waiting = [names[i] for i in state.waiting]
        yield f"Waiting: {some(waiting)}, because {WHY_WAITING[event['why']].format(waiting[0])}."
    for i in event.get("dropped", ()):
        yield f"The token of {names[i]} is dropped, because the sequence had already ended."
    for i, reason, stop in event.get("finished", ()):
        by = "" if stop is None else f" by {'token ' if isinstance(stop, int) else ''}{stop!r}"
        yield f"End: {names[i]} finishes ({reason}{by}) and releases its blocks."
    if "failed" in event:
        yield f"Failure: the steps in flight were reverted. {event['failed']}"
    if event.get("ended"):
        yield f"The trace ends with an error. {event['ended']}"
