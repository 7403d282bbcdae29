"""Scheduler: which sequences compute which tokens in the next step.

It owns the waiting and running queues, the rows and the steps in flight, and changes sequences and,
through its BlockManager, their blocks. It has no clock: the same calls give the same decisions.

As in vLLM v1's scheduler, there are no prefill steps and no decode steps. `schedule` plans for each
running sequence, oldest first, and then for each waiting one its uncomputed tokens, as many as the
token budget allows. This rule covers iteration-level batching (Orca, OSDI 2022), chunked prompts
(Sarathi-Serve, arXiv:2403.02310), prefix hits and resumption after preemption.

    add -> WAITING --admit--> RUNNING --commit: stop or length--> FINISHED
              ^                  |
              +---- preempt -----+      out of blocks: the most recently admitted is preempted
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.plan import Chunk, Join, StepOutput, StepPlan

# The waiting sequence with the smallest key is admitted first.
PolicyKey = Callable[[Sequence, BlockManager], int]
# Under "sjf" one position in the order of arrival is worth this many tokens.
AGING = 16


def first_come_first_served(seq: Sequence, blocks: BlockManager) -> int:
    return seq.arrival


def shortest_job_first(seq: Sequence, blocks: BlockManager) -> int:
    """Uncached prompt tokens, aged by arrival. The key is fixed when the request is queued.

    A request that arrives `d` requests later overtakes this one only if AGING * d is less than this
    one's uncached tokens, so at most uncached / AGING requests do.
    """
    uncached = seq.num_prompt - len(blocks.match(seq)) * blocks.block_size
    return uncached + AGING * seq.arrival


POLICIES: dict[str, PolicyKey] = {"fcfs": first_come_first_served, "sjf": shortest_job_first}


@dataclass(slots=True)
class InFlightStep:
    """A step that was planned and not yet committed, and its sequences."""

    plan: StepPlan
    sampling: list[Sequence] = field(default_factory=list)  # one token each, in plan order
    chunked: list[Sequence] = field(default_factory=list)  # one per chunk
    wait: Callable[[], StepOutput] | None = None  # set by the engine: what `runner.run` returned


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
        self.policy_key = POLICIES[policy]
        # A heap of (not at the head, key, arrival, sample index, sequence); see _enqueue. It can
        # contain aborted sequences, which are skipped and not counted in `num_waiting`.
        self.waiting: list[tuple[bool, int, int, int, Sequence]] = []
        self.num_waiting = 0
        self.running: list[Sequence] = []  # in order of admission
        self.in_flight: deque[InFlightStep] = deque()
        self.num_plans = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.prompt_tokens = 0  # of admitted sequences
        self.cached_tokens = 0  # those of them that were taken from the prefix cache
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._min_available = 0  # with fewer available blocks the next admission fails again

    def has_work(self) -> bool:
        return bool(self.running or self.num_waiting or self.in_flight)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Its forks follow with its first token, when its prompt is computed."""
        self._enqueue(seq)

    def _enqueue(self, seq: Sequence, at_head: bool = False) -> None:
        """Preempted sequences and forks wait at the head of the queue; arrival breaks ties."""
        seq.status, seq.num_tokens = Status.WAITING, len(seq.token_ids)
        key = 0 if at_head else self.policy_key(seq, self.blocks)
        heapq.heappush(self.waiting, (not at_head, key, seq.arrival, seq.index, seq))
        self.num_waiting += 1
        self._min_available = 0

    # ---- planning ----

    def schedule(self) -> InFlightStep | None:
        """Plan one step. None if nothing can be computed before the steps in flight are committed.

        num_computed and num_tokens of a sequence grow here and not at commit, so that the next step
        can be planned while this one runs. `abandon` reverts this.
        """
        step = InFlightStep(plan := StepPlan())
        decoding: list[Sequence] = []
        budget, block_size, preempted = self.token_budget, self.blocks.block_size, False

        # 1. Running sequences, oldest first. Only the most recently admitted is ever preempted, so
        #    the sequences that are already in this plan stay in it.
        i = 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            i += 1
            if seq.decoding:
                if seq.num_tokens >= seq.max_length:
                    continue  # its last token is in flight
                if seq.needs_copy_on_write or seq.num_computed == len(seq.block_table) * block_size:
                    preempted |= self._make_room(seq, 1)
                    if seq.status is not Status.RUNNING:
                        break
                    plan.new_blocks += self._allocate(plan, seq, 1)
                plan.decode_rows.append(seq.row)
                decoding.append(seq)
                budget -= 1
                seq.num_computed += 1
                seq.num_tokens += 1
                if seq.num_computed % block_size == 0:
                    self.blocks.cache_full_blocks(seq)
            else:
                tokens = min(seq.num_tokens - seq.num_computed, budget)
                preempted |= self._make_room(seq, tokens)
                if seq.status is not Status.RUNNING:
                    break
                plan.new_blocks += self._allocate(plan, seq, tokens)
                budget -= self._plan_chunk(step, seq, tokens)

        # 2. Waiting sequences, unless one was just preempted.
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
            self._allocate(plan, seq, tokens)  # the Join contains the whole block table
            join = Join(seq.row, list(seq.block_table), seq.sampling)
            if seq.sampling.rules is not None:
                join.prompt, join.output = seq.token_ids[: seq.num_prompt], seq.output_ids
            plan.joins.append(join)
            budget -= self._plan_chunk(step, seq, tokens)

        plan.num_tokens = self.token_budget - budget
        if not plan.num_tokens:
            return None
        step.sampling += decoding
        self.num_plans += 1
        self.in_flight.append(step)
        return step

    def _plan_chunk(self, step: InFlightStep, seq: Sequence, tokens: int) -> int:
        start, end = seq.num_computed, seq.num_computed + tokens
        last = end == seq.num_tokens
        chunk = Chunk(seq.row, start, seq.token_ids[start:end], sample=last)
        if self._wants_prompt_logprobs(seq):
            chunk.logprob_targets = seq.token_ids[start + 1 : min(end + 1, seq.num_prompt)]
        step.plan.chunks.append(chunk)
        step.chunked.append(seq)
        seq.num_computed, seq.last_chunk = end, self.num_plans
        if last:
            step.sampling.append(seq)
            seq.num_tokens += 1
            seq.decoding = True
        self.blocks.cache_full_blocks(seq)
        return tokens

    @staticmethod
    def _wants_prompt_logprobs(seq: Sequence) -> bool:
        rules = seq.sampling.rules
        return rules is not None and rules.prompt_logprobs is not None

    def _allocate(self, plan: StepPlan, seq: Sequence, tokens: int) -> list[tuple[int, int, int]]:
        """Give `seq` blocks for its next `tokens`. Returns the entries for plan.new_blocks."""
        blocks, new = self.blocks, []
        if (copy := blocks.copy_on_write(seq)) is not None:
            plan.block_copies.append(copy)
            new.append((seq.row, seq.num_computed // blocks.block_size, copy[1]))
        for _ in range(blocks.num_needed(seq, seq.num_computed + tokens)):
            new.append((seq.row, len(seq.block_table), blocks.append_block(seq)))
        return new

    def _make_room(self, seq: Sequence, tokens: int) -> bool:
        """Preempt sequences, in the end `seq` itself, until its next `tokens` have blocks.

        Returns whether any sequence was preempted.
        """
        need, preempted = self.blocks.num_needed(seq, seq.num_computed + tokens), False
        while self.blocks.num_available < need and seq.status is Status.RUNNING:
            self._preempt(self.running[-1])
            preempted = True
        return preempted

    def _admit(self, seq: Sequence) -> bool:
        """Give `seq` a row and the cached blocks that hold its beginning, if there is room.

        There must be blocks for all its tokens and one more for each running sequence. Without this
        reserve a full pool thrashes, because an admitted sequence is preempted a moment later. A
        sequence is always admitted if no other runs; add_request refuses what can never fit.
        """
        blocks, parent, alone = self.blocks, seq.parent, not self.running
        if not alone and blocks.num_available < self._min_available:
            return False
        if seq.num_tokens > len(seq.token_ids):
            return False  # preempted with a placeholder token, which must be committed first
        first_time = seq.preemptions == 0
        matched: list[int] = []
        if (
            first_time
            and parent is not None
            and parent.decoding
            # A plan copies blocks before it writes any, so the prompt must be from an earlier plan.
            and parent.last_chunk < self.num_plans
        ):
            # The last prompt token is computed again: the fork samples its own first token.
            blocks.fork(parent, seq, seq.num_prompt - 1)
        elif not self._wants_prompt_logprobs(seq):  # these need every position computed
            matched = blocks.match(seq)
        need = blocks.num_needed(seq, seq.num_tokens) - len(matched) + blocks.num_evictable(matched)
        need += 0 if alone else self.reserve()
        if blocks.num_available < need:
            self._min_available = need
            blocks.release(seq)
            return False
        if matched:
            blocks.share(seq, matched)
        if first_time:
            seq.num_cached = seq.num_computed
            self.prompt_tokens += seq.num_prompt
            self.cached_tokens += seq.num_computed
        else:
            self.recomputed_tokens -= seq.num_computed  # still cached, so not computed twice
        seq.row = self._free_rows.pop()
        seq.status = Status.RUNNING
        self.running.append(seq)
        self._min_available = 0
        return True

    def reserve(self) -> int:
        """Blocks that admission leaves available for the running sequences: one for each."""
        return len(self.running)

    def _preempt(self, seq: Sequence) -> None:
        """Return `seq` to the head of the waiting queue with its tokens, without its blocks."""
        self.running.remove(seq)
        self.recomputed_tokens += seq.num_computed
        self.preemptions += 1
        seq.preemptions += 1
        num_tokens = seq.num_tokens
        self._leave(seq)
        self._enqueue(seq, at_head=True)
        seq.num_tokens = num_tokens  # a placeholder token is still to be committed

    def _leave(self, seq: Sequence) -> None:
        """Release the row and the blocks of `seq`, or its place in the waiting queue."""
        self._min_available = 0
        if seq.status is Status.RUNNING:
            self.blocks.release(seq)
            self._free_rows.append(seq.row)
            seq.row, seq.decoding = -1, False
        elif seq.status is Status.WAITING:
            self.num_waiting -= 1
            if self.num_waiting == 0:
                self.waiting.clear()

    # ---- the results of a step ----

    def commit(self, step: InFlightStep, token_ids: list[int]) -> list[Sequence]:
        """Append the tokens of the oldest step in flight. Returns the sequences that got one.

        `token_ids` has one for each sampling chunk and then one for each decode row, in plan order.
        """
        assert step is self.in_flight[0], (
            "steps are committed in the order in which they were planned"
        )
        self.in_flight.popleft()
        block_size, any_finished = self.blocks.block_size, False
        progressed = []
        for seq, token in zip(step.sampling, token_ids, strict=True):
            if seq.status is Status.FINISHED:
                continue  # it ended while this token was in flight
            ids = seq.token_ids
            progressed.append(seq)
            if seq.forks:
                for fork in seq.forks:
                    self._enqueue(fork, at_head=True)
                seq.forks = []
            if token < 0:  # there was none to sample; see models/sampler.py
                self._finish(seq, "error")
                any_finished = True
                continue
            ids.append(token)
            if len(ids) % block_size == 0 and seq.num_computed >= len(ids):
                # A step in flight has computed the KV of this token already.
                self.blocks.cache_full_blocks(seq)
            if token in seq.stop_token_ids:
                self._finish(seq, "stop", token)
            elif len(ids) >= seq.max_length:
                self._finish(seq, "length")
            else:
                continue
            any_finished = True
        if any_finished:
            self.running = [s for s in self.running if s.status is Status.RUNNING]
        return progressed

    def abandon(self) -> None:
        """Revert all steps in flight after a failure.

        Their sequences return to the waiting queue with their known tokens. Blocks that these steps
        cached may hold anything and may be shared, so the whole prefix cache is reset.
        """
        self.in_flight.clear()
        # A plan may have been interrupted before it was complete, so every sequence is affected.
        for seq in reversed(list(self.running)):
            self._preempt(seq)
        for *_, seq in self.waiting:
            self.blocks.release(seq)
            seq.num_tokens = len(seq.token_ids)
        self.blocks.reset_prefix_cache()

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Finish a sequence in any state. What ended it before is overwritten."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        self._finish(seq, reason, stop_reason)

    def abort(self, seq: Sequence) -> None:
        """Finish a sequence in any state, unless it has finished."""
        if seq.status is not Status.FINISHED:
            self.finish(seq, "abort")

    def _finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        self._leave(seq)
        seq.status, seq.finish_reason, seq.stop_reason = Status.FINISHED, reason, stop_reason
