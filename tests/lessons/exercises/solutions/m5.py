"""A solution of `python -m lessons build m5`: what it adds to m4."""

import m4
from slots import blocks_to_append

from nanovllm.engine.sequence import Sequence


class Engine(m4.Engine):
    def plan(self) -> list[tuple[Sequence, int]]:
        plan = []
        for seq, count in self.admit():
            if self.make_room(seq, count):
                self.take_blocks(seq, count)
                plan.append((seq, count))
        return plan

    def make_room(self, seq: Sequence, count: int) -> bool:
        needed = blocks_to_append(seq.block_table, self.size, seq.num_computed, count)
        while seq in self.running and self.blocks.num_available < needed:
            last = self.running.pop()
            self.blocks.release(last)
            self.waiting.insert(0, last)
        return seq in self.running
