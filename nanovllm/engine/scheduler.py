"""Scheduler: decides which sequences compute which tokens in the next step.

It owns the waiting and running queues, the runner's rows and the steps in flight. It changes
sequences and, through its BlockManager, their blocks. For samples and beams see result_kinds.py.

As in vLLM v1, there are no prefill steps and no decode steps. `schedule` plans as many uncomputed
tokens as the budget allows: first for running sequences, oldest first, then for waiting ones. This
covers iteration-level batching (Orca, OSDI 2022), chunked prefill (Sarathi-Serve,
arXiv:2403.02310), prefix hits and resumption after preemption.

    add -> WAITING --admit--> RUNNING --commit: stop or length--> FINISHED
              ^                  |
              +---- preempt -----+      out of blocks: the most recently admitted is preempted

One step, with a budget of 8 tokens and blocks of 4:

    running  A  10 known,  9 computed   decodes, in its last block                       7 are left
             B   9 known,  8 computed   decodes, in a new block                          6 are left
    waiting  C  12 known,  4 cached     is admitted and computes 6 of 8 tokens: a chunk  0 are left
             D   3 known,  0 cached     waits: the token budget is spent
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nanovllm.engine import result_kinds
from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.policies import FIRST, POLICIES
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.plan import COMPLETE, Chunk, NewRow, ResultKind, StepOutput, StepPlan

if TYPE_CHECKING:
    from nanovllm.features.sampling.ngram import NgramSpeculation


@dataclass(slots=True)
class InFlightStep:
    """A step that is planned and not yet committed, with its sequences."""

    plan: StepPlan
    seqs: dict[int, Sequence] = field(default_factory=dict)  # by row
    evicted: list[int] = field(default_factory=list)  # blocks that were evicted for it
    get_output: Callable[[], StepOutput] | None = None  # the result of `runner.run`
    is_due: bool = False  # whether it must be committed before the next step is planned

    @property
    def sampling_seqs(self) -> list[Sequence]:
        """The sequence of each token that the step yields, in plan order."""
        chunks = [c for c in self.plan.chunks if c.result_kind is ResultKind.TOKEN]
        rows = [chunk.row for chunk in chunks for _ in range(1 + chunk.num_drafts)]
        return [self.seqs[row] for row in rows + self.plan.decode_rows]


class Scheduler:
    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        token_budget: int,
        policy: str = "fcfs",
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.policy_key = POLICIES[policy]
        self.waiting = deque[Sequence]()  # sorted; the first is admitted first
        self.why_waiting = ""  # why the last plan did not admit the first of them
        self.running: list[Sequence] = []  # in order of admission
        self.num_unfinished = 0  # sequences, including forks that are not queued yet
        self.in_flight: deque[InFlightStep] = deque()
        self.preemptions = self.recomputed_tokens = 0
        self.prompt_tokens = 0  # prompt tokens of admitted sequences
        self.cached_tokens = 0  # how many of these were in the prefix cache
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.speculation: NgramSpeculation | None = None  # an optional feature

    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.in_flight)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Its forks are queued when its first token is committed."""
        self.num_unfinished += 1 + len(seq.forks)
        self.queue(seq, self.policy_key(seq, self.block_manager))

    def queue(self, seq: Sequence, key: int = FIRST) -> None:
        """Insert a sequence into the queue by its key. By default, it becomes the head."""
        seq.status = Status.WAITING
        seq.queue_key = (key, seq.arrival, seq.index)
        insort(self.waiting, seq, key=lambda waiting: waiting.queue_key)

    # ---- planning ----

    def schedule(self) -> InFlightStep | None:
        """Plan one step, and count its tokens as computed. Returns None if none can be planned."""
        step = InFlightStep(plan := StepPlan())
        budget = self.token_budget
        preemptions = self.preemptions
        block_size = self.block_manager.block_size

        # 1. Running sequences, oldest first. Only the most recently admitted is preempted, so the
        #    sequences that are already in this plan stay in it.
        i = 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            i += 1
            planned = 0
            if self.speculation is not None:
                later = len(self.running) - i  # each later sequence gets a token too
                planned = self.speculation.plan(self, step, seq, budget - later)
            if planned or not seq.decoding:
                budget -= planned or self.plan_chunk(step, seq, budget)
            # If its placeholders reach `max_length`, its last token is already in flight.
            elif len(seq.token_ids) + seq.num_output_placeholders < seq.max_length:
                if seq.needs_copy_on_write or seq.num_computed == len(seq.block_table) * block_size:
                    if not self._make_room(seq, 1):
                        break
                    plan.new_blocks += self.allocate(seq, 1)
                plan.decode_rows.append(seq.row)
                step.seqs[seq.row] = seq
                budget -= 1
                seq.num_computed += 1
                seq.num_output_placeholders += 1
                if seq.num_computed % block_size == 0:
                    self.block_manager.cache_blocks(seq, seq.num_computed - 1)

        # 2. Waiting sequences, until one cannot be admitted.
        self.why_waiting = ""
        while self.waiting and not self.why_waiting:
            seq = self.waiting[0]
            self.why_waiting = self._admit(seq, budget, self.preemptions > preemptions)
            if not self.why_waiting:
                budget -= self.plan_chunk(step, seq, budget)

        plan.num_tokens = self.token_budget - budget
        if not plan.num_tokens:
            return self.schedule() if result_kinds.preempt_idle_beam(self) else None
        step.evicted = self.block_manager.fill_copies(plan)
        step.is_due = self.speculation is not None and self.speculation.needs_results(step)
        self.in_flight.append(step)
        return step

    def plan_chunk(self, step: InFlightStep, seq: Sequence, budget: int) -> int:
        """Plan at most `budget` known tokens of a running sequence. Returns their number."""
        tokens = min(len(seq.token_ids) - seq.num_computed, budget)
        # `tokens` is 0 while a result is in flight, and until the next token of a beam is chosen.
        if tokens == 0 or not self._make_room(seq, tokens):
            return 0
        start, end = seq.num_computed, seq.num_computed + tokens
        new_blocks = self.allocate(seq, tokens)
        if seq.known_to_runner:
            step.plan.new_blocks += new_blocks
        else:
            new_row = NewRow(seq.row, list(seq.block_table), seq.sampling)
            if seq.sampling.rules is not None:
                new_row.prompt = seq.token_ids[: seq.num_prompt]
                new_row.output = seq.output_ids
            step.plan.new_rows.append(new_row)
            seq.known_to_runner = True
        step.seqs[seq.row] = seq
        seq.num_computed = end
        kind = seq.result_kind if end == len(seq.token_ids) else None
        step.plan.chunks.append(chunk := Chunk(seq.row, start, seq.token_ids[start:end], kind))
        if kind is ResultKind.TOKEN:
            seq.num_output_placeholders += 1
            seq.decoding = True
        if seq.targets or seq.num_candidates:
            result_kinds.request_logprobs(chunk, seq)
        self.block_manager.cache_blocks(seq, start)
        return tokens

    def allocate(self, seq: Sequence, tokens: int) -> list[tuple[int, int, int]]:
        """Append blocks for the next `tokens` of `seq`. Returns entries for `plan.new_blocks`."""
        new: list[tuple[int, int, int]] = []
        if (copy := self.block_manager.copy_on_write(seq)) is not None:
            new.append((seq.row, seq.num_computed // self.block_manager.block_size, copy))
        for _ in range(self.block_manager.num_needed(seq, seq.num_computed + tokens)):
            new.append((seq.row, len(seq.block_table), self.block_manager.append_block(seq)))
        return new

    def _make_room(self, seq: Sequence, tokens: int) -> bool:
        """Preempt until there are blocks for the next tokens. Returns whether `seq` still runs."""
        need = self.block_manager.num_needed(seq, seq.num_computed + tokens)
        while self.block_manager.num_available < need and seq.status is Status.RUNNING:
            self.preempt(self.running[-1])
        return seq.status is Status.RUNNING

    def _admit(self, seq: Sequence, budget: int, preempted: bool) -> str:
        """Run the first waiting sequence if possible. Returns "", or why it waits, in a word."""
        if budget == 0:
            return "budget"
        if preempted:
            return "preempted"
        if len(self.running) == self.max_num_seqs:
            return "seqs"
        if seq.num_output_placeholders:
            return "in flight"
        matched = self.block_manager.match(seq)
        if not self.block_manager.is_ready(matched):
            return "state"
        if not self.has_room(seq, matched):
            return "blocks"
        self.block_manager.attach_cached(seq, matched)
        self.start_running(seq)
        return ""

    def has_room(self, seq: Sequence, matched: list[Block]) -> bool:
        """Return whether the available blocks suffice for all tokens of `seq` and the reserve."""
        needed = self.block_manager.num_needed(seq, len(seq.token_ids)) + self.reserve()
        # A matched block that another sequence owns is not one of the available blocks.
        needed -= sum(block.ref_count > 0 for block in matched)
        return self.block_manager.num_available >= needed

    def reserve(self) -> int:
        """Return how many blocks admission leaves available, so that it causes no preemption."""
        return len(self.running)

    def start_running(self, seq: Sequence) -> None:
        """Assign a row to a waiting sequence. Its matched or shared blocks are attached already."""
        self.waiting.remove(seq)
        if seq.preemptions:
            self.recomputed_tokens -= seq.num_computed  # still cached, so not computed twice
        elif not seq.num_output:  # a fork of a beam has output
            seq.num_cached_tokens = seq.num_computed
            self.prompt_tokens += seq.num_prompt
            self.cached_tokens += seq.num_computed
        seq.row = self.free_rows.pop()
        seq.known_to_runner = False
        seq.status = Status.RUNNING
        self.running.append(seq)

    def preempt(self, seq: Sequence) -> None:
        """Return `seq` to the head of the waiting queue. It keeps its tokens, not its blocks."""
        self.recomputed_tokens += seq.num_computed
        self.preemptions += 1
        seq.preemptions += 1
        self.leave(seq)
        if seq.awaits_token:
            seq.status = Status.UNQUEUED
        else:
            self.queue(seq)

    def leave(self, seq: Sequence) -> None:
        """Release the row and the blocks of `seq`, or its place in the waiting queue."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self.block_manager.release(seq)
            self.free_rows.append(seq.row)
            seq.leave_row()
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)

    # ---- the results of a step ----

    def commit(self, step: InFlightStep, token_ids: list[int]) -> list[Sequence]:
        """Append the tokens of `step.sampling_seqs`. Returns the sequences that got a result."""
        self.in_flight.popleft()  # the same step
        updated = result_kinds.commit_other_results(self, step)
        results: Iterable[tuple[Sequence, int]] = zip(step.sampling_seqs, token_ids, strict=True)
        if self.speculation is not None:
            results = self.speculation.accept(step, results)
        for seq, token in results:
            if seq.status is Status.FINISHED:
                continue  # it ended while this token was in flight
            updated.append(seq)
            # Each fork computes the prompt's last token again, and samples its own first token.
            for child in seq.forks:
                result_kinds.fork(self, seq, child, seq.num_prompt - 1)
            seq.forks = []
            if token < 0:  # NO_TOKEN or COMPLETE
                self.finish(seq, "stop" if token == COMPLETE else "error")
                continue
            seq.token_ids.append(token)
            seq.num_output_placeholders -= 1
            length = len(seq.token_ids)
            if length % self.block_manager.block_size == 0 and seq.num_computed >= length:
                # The step in flight after this one computes the KV of this token.
                self.block_manager.cache_full_blocks(seq)
            self.finish_if_complete(seq)
        return updated

    def finish_if_complete(self, seq: Sequence) -> None:
        """Finish a sequence if it ends with a stop token or has its full length."""
        token = seq.token_ids[-1]
        if token in seq.stop_token_ids:
            self.finish(seq, "stop", token)
        elif len(seq.token_ids) >= seq.max_length:
            self.finish(seq, "length")

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Finish a sequence in any state, unless it has finished."""
        if seq.status is Status.FINISHED:
            return
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        self.leave(seq)
        self.num_unfinished -= 1
        seq.status = Status.FINISHED
        seq.sampling = replace(seq.sampling, rules=None)  # they can refer to large objects
