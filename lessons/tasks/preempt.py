"""Preemption: when no block is available, the sequence that was admitted last waits again.

The task. Write `_make_room`: while fewer blocks are available than the next `tokens` tokens of
`seq` need, it preempts the running sequence that was admitted last. It returns whether `seq` still
runs. Write `preempt`: the sequence loses its row and blocks, and becomes the head of the waiting
queue. self.preemptions and seq.preemptions grow by 1. self.recomputed_tokens grows by the
seq.num_computed before release(seq), which sets it to 0. (When the sequence is admitted again, the
engine subtracts the tokens that it finds in the prefix cache.)

Example: 4 blocks of 2 slots. Sequences 0, 1 and 2 run, with 2, 1 and 1 blocks, which are full. Each
needs a block. For sequence 0, 2 is preempted, which makes one block available. Then 1 needs one. It
is the one that was admitted last, so it is preempted itself, and `_make_room` returns False.

In the engine: _make_room and preempt in nanovllm/engine/scheduler.py. Hints: self.block_manager has
num_available, release(seq) and num_needed(seq, n), the number of blocks that seq must still get to
have a slot for each of its first n tokens. Here n is seq.num_computed + tokens. self.running is in
the order of admission, and a sequence with the status Status.RUNNING (sequence.py) still runs. A
row is an index from self.free_rows; without one, seq.row is -1. A sequence without a row cannot
decode, so seq.decoding must be False. self.queue(seq) sets its status to Status.WAITING and makes
it the head of the waiting queue.
"""

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence


class Preempting(Scheduler):
    def _make_room(self, seq: Sequence, tokens: int) -> bool:
        raise NotImplementedError("_make_room is to be written; see the top of this file")

    def preempt(self, seq: Sequence) -> None:
        raise NotImplementedError("preempt is to be written; see the top of this file")
