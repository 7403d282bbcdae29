"""Events of a trace, and the state of the engine after them.

An event contains what has changed since the previous event. `State.apply` replays events, and
`apply` in page.html does the same in a browser.

    plan 1, commit 1, plan 2, commit 2, plan 3, ...     each plan begins a step of the trace
    plan 1, plan 2, commit 1, plan 3, commit 2, ...     with async scheduling

Sequences are numbered from 0 in the order in which they appear. Steps are numbered from 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypedDict


class Event(TypedDict, total=False):
    """A change. Unchanged queues, decodes and receivers are missing, and empty lists too."""

    # One of these four says what happened.
    plan: int  # the number of the step that was planned
    commit: int  # the step whose tokens were read
    failed: str  # the error that reverted all steps in flight
    ended: str  # the error that ended the `with` block, or "" for no error

    # Microseconds from the start of the trace to the launch of a plan, or to the arrival of the
    # tokens of a commit.
    time: int
    # New sequences: name, number of prompt tokens, known token ids, number of computed tokens, and
    # the number of the parent or -1.
    new: list[tuple[str, int, list[int], int, int]]
    running: list[int]  # in order of admission
    waiting: list[int]  # in the order of the queue
    # Changed block tables: sequence, number of unchanged blocks at the start, and all later blocks.
    tables: list[list[int]]
    cached: list[int]  # blocks that entered or left the prefix cache
    preempted: list[int]
    finished: list[tuple[int, str, int | str | None]]  # sequence, finish_reason, stop_reason
    host_cached: list[int]  # host blocks that entered or left the cache in host memory
    # All beams of the searches that have chosen beams, with the sums of the log-probabilities of
    # their outputs.
    scores: list[tuple[int, float]]

    # Only a plan has these fields.
    chunks: list[list[int]]  # sequence, first position, number of tokens
    decodes: list[int]  # sequences
    new_rows: list[int]
    copies: list[tuple[int, int]]  # blocks (source, target)
    # States of linear attention; see features/models/hybrid/states.py for their numbers.
    states_read: list[tuple[int, int]]  # a state, and the sequence that begins with a copy of it
    states_saved: list[tuple[int, int, int]]  # sequence, number of tokens, slot
    saved: list[tuple[int, int]]  # block, host block
    loaded: list[tuple[int, int]]  # host block, block
    host: dict[str, int]  # counters of the host cache, if blocks were saved or loaded
    evicted: list[int]
    why: str  # Scheduler.why_waiting; a key of WHY_WAITING in show.py

    # Only a commit has these fields.
    tokens: list[int]  # -1 if no token could be sampled
    receivers: list[int]  # the sequences that got these tokens
    # For requests with `logprobs`: sequence, rank of its token (1 is the most likely), and pairs
    # (token, probability). The first pair is for its token. The most likely other tokens follow.
    likely: list[tuple[int, int, list[tuple[int, float]]]]
    dropped: list[int]  # sequences that ended before their token was read
    # Drafts of n-gram speculation: sequence, number of drafts in the step, number of accepted ones.
    drafts: list[tuple[int, int, int]]
    # Outputs that a beam search found: the beam before it ended, the last token, the score that is
    # normalized by the length, and the reason.
    results: list[tuple[int, int, float, str]]


@dataclass(slots=True)
class SeqState:
    """A sequence after some events."""

    name: str
    num_prompt: int
    tokens: list[int]  # known token ids
    computed: int  # tokens whose KV is in the cache after all plans so far
    parent: int  # the sequence that it is forked from, or -1
    lost: int = 0  # the largest `computed` that a preemption discarded
    table: list[int] = field(default_factory=list)
    score: float | None = None  # of a beam

    def kind(self, start: int) -> str:
        """Return what a plan computes from position `start` on: "prompt", "decode" or "again"."""
        # A sequence with output has computed all tokens but the last at least once.
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
    host_cached: set[int] = field(default_factory=set)
    decodes: list[int] = field(default_factory=list)  # of the last plan
    receivers: list[int] = field(default_factory=list)  # of the last commit

    def apply(self, event: Event) -> None:
        """Apply the changes of an event to the state."""
        for name, num_prompt, tokens, computed, parent in event.get("new", ()):
            self.seqs.append(SeqState(name, num_prompt, list(tokens), computed, parent))
        self.ran_before = self.running
        self.running = event.get("running", self.running)
        self.waiting = event.get("waiting", self.waiting)
        for number, keep, *blocks in event.get("tables", ()):
            self.seqs[number].table[keep:] = blocks
        self.cached ^= set(event.get("cached", ()))
        self.host_cached ^= set(event.get("host_cached", ()))
        for number, score in event.get("scores", ()):
            self.seqs[number].score = score
        for number in event.get("preempted", ()):
            seq = self.seqs[number]
            seq.lost = max(seq.lost, seq.computed)
            seq.computed = 0
        if "plan" in event:
            self.decodes = event.get("decodes", self.decodes)
            for number in self.decodes:
                self.seqs[number].computed += 1
            for number, start, count in event["chunks"]:
                self.seqs[number].computed = start + count
        if "commit" in event:
            self.receivers = event.get("receivers", self.receivers)
            for number, token in zip(self.receivers, event["tokens"], strict=True):
                if token >= 0:
                    self.seqs[number].tokens.append(token)
            for number, drafted, accepted in event.get("drafts", ()):
                self.seqs[number].computed -= drafted - accepted

    def pool(self, num_blocks: int) -> tuple[int, int, int]:
        """Return the numbers of free blocks, cached blocks without owners, and shared blocks."""
        owners = Counter(block for seq in self.seqs for block in seq.table)
        cached = len(self.cached - owners.keys())
        shared = sum(count > 1 for count in owners.values())
        return num_blocks - len(owners) - cached, cached, shared
