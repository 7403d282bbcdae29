"""What the scheduler does for rows that yield something other than one sampled token.

These are several samples of one prompt, beams, embeddings and scores. After a result that is not a
token, a sequence waits until its task ends it, or appends its next token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.engine.sequence import Sequence, Status
from nanovllm.plan import Chunk, ResultKind, RowSampling

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import InFlightStep, Scheduler

# The fields that a fork has from its parent.
SHARED = (
    "request_id",
    "arrival",
    "num_prompt",
    "max_length",
    "stop_token_ids",
    "request",
    "result_kind",
    "num_candidates",
)


def make_fork(
    parent: Sequence, token_ids: list[int], sampling: RowSampling, index: int
) -> Sequence:
    """Return a new sequence of the same request that begins like `parent`."""
    shared = {name: getattr(parent, name) for name in SHARED}
    return Sequence(token_ids=token_ids, sampling=sampling, index=index, parent=parent, **shared)


def fork(scheduler: Scheduler, parent: Sequence, child: Sequence, num_computed: int) -> None:
    """Run `child`, whose first `num_computed` tokens `parent` has computed.

    It shares the parent's blocks if a row and enough blocks are available and no other sequence is
    at the head of the queue. Otherwise it waits there without blocks, as after a preemption.
    """
    block_manager = scheduler.block_manager
    scheduler.queue(child)
    has_row = parent.status is Status.RUNNING and len(scheduler.running) < scheduler.max_num_seqs
    can_fork = has_row and block_manager.can_fork(parent, num_computed)
    if can_fork and scheduler.waiting[0] is child:
        block_manager.fork(parent, child, num_computed)
        if scheduler.has_room(child, []):
            scheduler.start_running(child)
        else:
            block_manager.release(child)


def append(scheduler: Scheduler, seq: Sequence, token: int) -> None:
    """Append the token that a task chose for a sequence that awaits it."""
    seq.token_ids.append(token)
    seq.awaits_token = False
    if seq.sampling.rules is not None and seq.sampling.rules.grammar is not None:
        seq.known_to_runner = False  # the grammar needs its tokens, which a new row sends
    if seq.status is not Status.RUNNING:
        scheduler.queue(seq)


def preempt_idle_beam(scheduler: Scheduler) -> bool:
    """Preempt a beam that waits for another beam, which is queued because it lacks blocks."""
    idle = [seq for seq in scheduler.running if seq.awaits_token]
    if scheduler.waiting and idle and not scheduler.in_flight:
        scheduler.preempt(idle[-1])
        return True
    return False


def request_logprobs(chunk: Chunk, seq: Sequence) -> None:
    """Set the candidates or the targets whose log-probabilities a chunk yields."""
    chunk.num_candidates, chunk.num_logprobs = seq.num_candidates, seq.num_logprobs
    end = chunk.start + len(chunk.token_ids)
    if end >= seq.first_target:
        # The token at each position predicts the next one, so the targets go up to `end`.
        first = max(chunk.start + 1, seq.first_target)
        chunk.logprobs_from = first - 1 - chunk.start
        begin, stop = first - seq.first_target, end + 1 - seq.first_target
        chunk.logprob_targets = seq.targets[begin:stop]


def commit_other_results(scheduler: Scheduler, step: InFlightStep) -> list[Sequence]:
    """Mark the sequences that have a result other than a token, and return them."""
    updated = []
    for chunk in step.plan.chunks:
        seq = step.seqs[chunk.row]
        if chunk.result_kind in (None, ResultKind.TOKEN) or seq.status is Status.FINISHED:
            continue
        updated.append(seq)
        seq.awaits_token = True
        if seq.status is Status.WAITING:  # it was preempted while the step was in flight
            scheduler.leave(seq)
            seq.status = Status.UNQUEUED
    return updated
