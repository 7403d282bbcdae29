"""What is undone after an error or Ctrl-C at any line of a step, so that all requests can continue.

Only known tokens are kept. All rows and blocks are freed, the sequences return to the waiting
queue, and their tokens are computed again. The prefix cache is cleared, because a failed step may
have left any content in blocks.
"""

from collections.abc import Iterable

from nanovllm.engine.policies import FIRST
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status


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
        if not seq.awaits_token and seq.finish_reason is None:
            is_new = not seq.preemptions and seq.parent is None
            key = scheduler.policy_key(seq, scheduler.block_manager) if is_new else FIRST
            scheduler.queue(seq, key)
    scheduler.num_unfinished = sum(1 + len(seq.forks) for seq in unfinished)
