"""Scheduler: decides what the next step computes.

Owns: the waiting and running queues and the rows. Given: sequences, and the tokens that were drawn.
Mutates: sequences, and through its BlockManager their blocks. Knows the runner only by the plans
that it makes for it. No torch, no clock: the same calls give the same decisions.

There is no prefill phase and no decode phase. `schedule` walks the running sequences, oldest first,
and then the waiting ones, and gives each as many tokens as it lacks and the token budget leaves.

    add -> WAITING --admit--> RUNNING --commit: stop or length--> FINISHED
              ^                  |
              +----- preempt ----+      out of blocks: the last to come gives way
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.plan import Chunk, Join, StepPlan

OrderKey = Callable[[Sequence, BlockManager], int]


def first_come_first_served(seq: Sequence, blocks: BlockManager) -> int:
    return seq.arrival


def shortest_job_first(seq: Sequence, blocks: BlockManager) -> int:
    """Prompt tokens still to be computed, aged by arrival.

    The key is fixed when the request is queued. A request that came `d` later overtakes this one
    only if AGING * d < this one's uncached tokens: at most uncached / AGING requests ever do.
    """
    uncached = seq.num_prompt - len(blocks.match(seq)) * blocks.block_size
    return uncached + AGING * seq.arrival


AGING = 16  # tokens that one later arrival is worth
POLICIES: dict[str, OrderKey] = {
    "fcfs": first_come_first_served,
    "sjf": shortest_job_first,
}


@dataclass(slots=True)
class InFlight:
    """A plan that was made and not yet committed, with the sequences that it is about."""

    plan: StepPlan
    drawing: list[Sequence] = field(default_factory=list)  # those that get a token, in plan order
    chunked: list[Sequence] = field(default_factory=list)  # those with a chunk, in plan order


class Scheduler:
    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str = "fcfs",
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.token_budget = max_num_batched_tokens
        self.order = POLICIES[policy]
        # A heap of (not at the head, key, arrival, sample index, sequence); see _enqueue.
        self.waiting: list[tuple[bool, int, int, int, Sequence]] = []
        self.num_waiting = 0  # entries of the heap that were not aborted since
        self.running: list[Sequence] = []  # in order of admission
        self.in_flight: deque[InFlight] = deque()
        self.num_plans = 0
        self._rows = list(range(max_num_seqs - 1, -1, -1))
        self._retry_at = 0  # available blocks below which the next to be admitted cannot be
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.prompt_tokens = 0  # of admitted sequences, and how many of them were found cached
        self.cached_tokens = 0

    def has_work(self) -> bool:
        return bool(self.running or self.num_waiting or self.in_flight)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Its forks follow when it has drawn a token: its prompt is computed then."""
        self._enqueue(seq)

    def _enqueue(self, seq: Sequence, at_head: bool = False) -> None:
        """At the head stand sequences that were preempted, and forks; arrival breaks ties."""
        seq.status, seq.num_tokens = Status.WAITING, len(seq.token_ids)
        key = 0 if at_head else self.order(seq, self.blocks)
        heapq.heappush(self.waiting, (not at_head, key, seq.arrival, seq.index, seq))
        self.num_waiting += 1
        self._retry_at = 0

    # ---- planning ----

    def schedule(self) -> StepPlan | None:
        """Plan one step; None if nothing can be computed before the plans in flight are committed.

        A sequence's num_computed and num_tokens grow here, not at commit: what a plan promises, the
        next plan may count on. `abandon` takes it back.
        """
        plan = StepPlan()
        step = InFlight(plan)
        drawn_by_decode: list[Sequence] = []
        budget, size, preempted = self.token_budget, self.blocks.block_size, False

        # 1. Running sequences, oldest first. Victims come from the young end, so one that has its
        #    part in this plan already is never preempted by a younger one.
        i = 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            i += 1
            if seq.decoding:
                if seq.num_tokens >= seq.max_length:
                    continue  # its last token is drawn and only waits to be committed
                if seq.shares_tail or seq.num_computed == len(seq.block_table) * size:
                    preempted |= self._make_room(seq, 1)
                    if seq.status is not Status.RUNNING:
                        break
                    self._provide(plan, seq, 1)
                plan.decode_rows.append(seq.row)
                drawn_by_decode.append(seq)
                budget -= 1
                seq.num_computed += 1
                seq.num_tokens += 1
                if seq.num_computed % size == 0:
                    self.blocks.publish(seq)
            else:
                tokens = min(seq.num_tokens - seq.num_computed, budget)
                preempted |= self._make_room(seq, tokens)
                if seq.status is not Status.RUNNING:
                    break
                self._provide(plan, seq, tokens)
                budget -= self._plan_chunk(step, seq, tokens)

        # 2. Waiting sequences, unless blocks have just run out.
        while (
            self.waiting and budget > 0 and not preempted and len(self.running) < self.max_num_seqs
        ):
            seq = self.waiting[0][-1]
            if seq.status is Status.FINISHED:  # aborted while it waited
                heapq.heappop(self.waiting)
                continue
            if not self._admit(seq):
                break
            heapq.heappop(self.waiting)
            self.num_waiting -= 1
            tokens = min(seq.num_tokens - seq.num_computed, budget)
            join = Join(seq.row, list(seq.block_table), seq.sampling)
            if seq.sampling.rules is not None:
                join.prompt, join.output = seq.token_ids[: seq.num_prompt], seq.output_ids
            plan.joins.append(join)
            self._provide(plan, seq, tokens)
            budget -= self._plan_chunk(step, seq, tokens)

        plan.num_tokens = self.token_budget - budget
        if not plan.num_tokens:
            return None
        step.drawing += drawn_by_decode
        self.num_plans += 1
        self.in_flight.append(step)
        return plan

    def _plan_chunk(self, step: InFlight, seq: Sequence, tokens: int) -> int:
        start, end = seq.num_computed, seq.num_computed + tokens
        last = end == seq.num_tokens
        chunk = Chunk(seq.row, start, seq.token_ids[start:end], sample=last)
        if seq.wants_prompt_logprobs:
            chunk.targets = seq.token_ids[start + 1 : min(end + 1, seq.num_prompt)]
        step.plan.chunks.append(chunk)
        step.chunked.append(seq)
        seq.num_computed, seq.last_chunk = end, self.num_plans
        if last:
            step.drawing.append(seq)
            seq.num_tokens += 1
            seq.decoding = True
        self.blocks.publish(seq)
        return tokens

    def _provide(self, plan: StepPlan, seq: Sequence, tokens: int) -> None:
        """Give `seq` blocks of its own for its next `tokens`, and tell the runner."""
        blocks, table = self.blocks, seq.block_table
        if seq.shares_tail:
            copy = blocks.own_tail(seq)
            if copy is not None:
                plan.block_copies.append(copy)
                plan.new_blocks.append((seq.row, seq.num_computed // blocks.block_size, copy[1]))
        for index in range(
            len(table), len(table) + blocks.num_needed(seq, seq.num_computed + tokens)
        ):
            plan.new_blocks.append((seq.row, index, blocks.append(seq)))

    def _make_room(self, seq: Sequence, tokens: int) -> bool:
        """Make blocks for the next `tokens` of `seq` available, at the cost of the last to come.

        That may be `seq` itself, which then waits again. True if any sequence was preempted.
        """
        need, preempted = self.blocks.num_needed(seq, seq.num_computed + tokens), False
        while self.blocks.num_available < need and seq.status is Status.RUNNING:
            self._preempt(self.running[-1])
            preempted = True
        return preempted

    def _admit(self, seq: Sequence) -> bool:
        """Give `seq` a row and the blocks that hold its beginning already; False if it must wait.

        It must wait until there is room for all its tokens, and head-room for the running ones to
        grow: without it a full pool thrashes, and what is admitted now is preempted a moment later.
        A sequence alone is always admitted; add_request refused what could never fit.
        """
        blocks, parent, alone = self.blocks, seq.parent, not self.running
        if not alone and blocks.num_available < self._retry_at:
            return False
        if seq.num_tokens > len(seq.token_ids):
            return False  # preempted with a token in flight, which must be known to be computed
        fresh = seq.preemptions == 0
        shared: list[int] = []
        if (
            fresh
            and parent is not None
            and parent.decoding
            and parent.last_chunk < self.num_plans  # its tail is copied before this plan writes
        ):
            # One token is computed again, for its logits: the fork draws its own first token.
            blocks.fork(parent, seq, seq.num_prompt - 1)
        elif not seq.wants_prompt_logprobs:  # those need every position computed
            shared = blocks.match(seq)
        need = blocks.num_needed(seq, seq.num_tokens) - len(shared) + blocks.num_idle(shared)
        need += 0 if alone else self.head_room()
        if blocks.num_available < need:
            self._retry_at = need
            blocks.release(seq)
            return False
        if shared:
            blocks.adopt(seq, shared)
        if fresh:
            seq.num_cached = seq.num_computed
            self.prompt_tokens += seq.num_prompt
            self.cached_tokens += seq.num_computed
        else:
            self.recomputed_tokens -= seq.num_computed  # found again: not computed twice
        seq.row = self._rows.pop()
        seq.status = Status.RUNNING
        self.running.append(seq)
        self._retry_at = 0
        return True

    def head_room(self) -> int:
        """Blocks that admission leaves for the running sequences to grow into: one for each."""
        return len(self.running)

    def _preempt(self, seq: Sequence) -> None:
        """Back to the head of the waiting queue, with all that it has generated."""
        self.running.remove(seq)
        self.recomputed_tokens += seq.num_computed
        self.preemptions += 1
        seq.preemptions += 1
        promised = seq.num_tokens
        self._leave(seq)
        self._enqueue(seq, at_head=True)
        seq.num_tokens = promised  # a token in flight is still its own, once it is committed

    def _leave(self, seq: Sequence) -> None:
        """Give up row and blocks, or the place in the queue, whose entry is skipped when it comes up."""
        if seq.status is Status.RUNNING:
            self.blocks.release(seq)
            self._rows.append(seq.row)
            seq.row, seq.decoding = -1, False
        elif seq.status is Status.WAITING:
            self.num_waiting -= 1
            if self.num_waiting == 0:
                self.waiting.clear()

    def _finish(self, seq: Sequence, reason: str) -> None:
        self._leave(seq)
        seq.status, seq.finish_reason = Status.FINISHED, reason

    # ---- what came of a plan ----

    def commit(self, plan: StepPlan, tokens: list[int]) -> list[Sequence]:
        """Take the tokens that the oldest plan in flight drew; return the sequences that got one.

        `tokens` has one for each sampling chunk, then one for each decode row, in plan order.
        """
        step = self.in_flight.popleft()
        assert step.plan is plan, "plans are committed in the order in which they were made"
        size, finished = self.blocks.block_size, False
        progressed = []
        for seq, token in zip(step.drawing, tokens, strict=True):
            if seq.status is Status.FINISHED:
                continue  # found one step late: this token was drawn for nothing
            ids = seq.token_ids
            ids.append(token)  # len grows here
            progressed.append(seq)
            if seq.forks:
                for fork in seq.forks:
                    self._enqueue(fork, at_head=True)
                seq.forks = []
            if len(ids) % size == 0 and seq.num_computed >= len(ids):
                # With a plan in flight, the KV of the token just learnt is computed already.
                self.blocks.publish(seq)
            if token in seq.stop_token_ids:
                seq.stop_reason = token
                self._finish(seq, "stop")
            elif len(ids) >= seq.max_length:
                self._finish(seq, "length")
            else:
                continue
            finished = True
        if finished:
            self.running = [s for s in self.running if s.status is Status.RUNNING]
        return progressed

    def abandon(self) -> None:
        """Take back every plan in flight: none of it was computed, as far as anyone may rely on it.

        Each sequence in one goes back to the waiting queue with the tokens that it knows. Blocks
        that those plans published may hold anything, and may have passed through other hands
        since, so the whole index is forgotten: dear, simple and rare.
        """
        touched = [seq for step in self.in_flight for seq in (*step.drawing, *step.chunked)]
        self.in_flight.clear()
        for seq in touched:
            if seq.status is Status.RUNNING:
                self._preempt(seq)
            seq.num_tokens = len(seq.token_ids)
        self.blocks.reset_prefix_cache()

    def stop(self, seq: Sequence, reason: str) -> None:
        """End a sequence for a reason that only its text shows: a stop string."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        self._finish(seq, "stop")
        seq.stop_reason = reason

    def abort(self, seq: Sequence) -> None:
        """End a sequence wherever it is."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        if seq.status is not Status.FINISHED:
            self._finish(seq, "abort")
