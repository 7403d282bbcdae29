"""What is undone after an error or Ctrl-C at any line of a step, so that all requests can continue.

Only known tokens are kept. All rows and blocks are freed, the sequences return to the waiting
queue, and their tokens are computed again. The prefix cache is cleared, because a failed step may
have left any content in blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from nanovllm.engine.policies import FIRST
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.plan import ResultKind

if TYPE_CHECKING:
    from nanovllm.engine.sampling import Sampling


def revert_in_flight(scheduler: Scheduler, seqs: Iterable[Sequence]) -> None:
    """Revert all steps in flight, and queue the unfinished ones of `seqs`.

    A sequence with a finish reason is not queued: the caller must finish it.
    """
    unfinished = [seq for seq in seqs if seq.status is not Status.FINISHED]
    ran = scheduler.running
    for seq in ran:
        scheduler.recomputed_tokens += seq.num_computed
        scheduler.preemptions += 1
        seq.preemptions += 1
    scheduler.block_manager.revert([*ran, *scheduler.waiting, *unfinished])
    scheduler.in_flight.clear()
    scheduler.running = []
    scheduler.waiting.clear()
    scheduler.free_rows = list(range(scheduler.max_num_seqs - 1, -1, -1))
    for seq in unfinished:
        seq.status, seq.row, seq.decoding, seq.lookup = Status.UNQUEUED, -1, False, None
        seq.num_output_placeholders = 0
        if seq.finish_reason is None and seq.result_kind is ResultKind.TOKEN and seq.num_output:
            scheduler.finish_if_complete(seq)
        if not seq.awaits_token and seq.finish_reason is None:
            is_new = not seq.preemptions and seq.parent is None
            key = scheduler.policy_key(seq, scheduler.block_manager) if is_new else FIRST
            scheduler.queue(seq, key)
    left = (seq for seq in unfinished if seq.status is not Status.FINISHED)
    scheduler.num_unfinished = sum(1 + len(seq.forks) for seq in left)


def rewind_samples(task: Sampling, request: Request) -> list[Sequence]:
    """`Task.rewind` for generated tokens."""
    # Output tokens that `Sampling.receive` has not processed are removed.
    for sample in request.samples if request.is_watched else ():
        seq = sample.seq
        received = seq.num_output if task.params.logprobs is None else len(sample.logprobs)
        if sample.detokenizer is not None:
            received = min(received, sample.num_detokenized)
        if received < seq.num_output:
            del seq.token_ids[seq.num_prompt + received :]
            del sample.logprobs[received:]
            if sample.detokenizer is not None:  # it may have read the removed tokens
                sample.detokenizer = task.detokenizer(seq)
                sample.text = sample.detokenizer.add(seq.output_ids)
                sample.num_detokenized = received
            seq.status, seq.finish_reason, seq.stop_reason = Status.UNQUEUED, None, None
            # `Scheduler.finish` has removed the rules.
            seq.sampling = replace(seq.sampling, rules=task.rules)
    first, *others = request.seqs
    if first.status is not Status.FINISHED:
        first.forks = [] if first.num_output else others
    for seq in first.forks:
        seq.status = Status.UNQUEUED
    return [first] if first.forks else [first, *others]
