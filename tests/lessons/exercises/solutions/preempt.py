"""A solution of `python -m lessons build preempt`."""

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence


class Preempting(Scheduler):
    def _make_room(self, seq: Sequence, tokens: int) -> bool:
        needed = self.block_manager.num_needed(seq, seq.num_computed + tokens)
        while self.block_manager.num_available < needed and seq in self.running:
            self.preempt(self.running[-1])
        return seq in self.running

    def preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.recomputed_tokens += seq.num_computed
        self.block_manager.release(seq)
        self.free_rows.append(seq.row)
        seq.row, seq.decoding = -1, False
        self.preemptions += 1
        seq.preemptions += 1
        self.queue(seq)
