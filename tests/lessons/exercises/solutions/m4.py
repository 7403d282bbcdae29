"""A solution of `python -m lessons build m4`: what it adds to m3."""

import m3
from eviction import FewestHits
from prefix import Matching

from lessons.lesson02_model import Model
from nanovllm.engine.sequence import Sequence


class Blocks(Matching, FewestHits):
    pass


class Engine(m3.Engine):
    def __init__(
        self, model: Model, num_blocks: int, size: int, max_num_seqs: int, budget: int
    ) -> None:
        super().__init__(model, num_blocks, size, max_num_seqs, budget)
        self.blocks = Blocks(num_blocks, size)

    def admit(self) -> m3.Plan:
        for seq in self.waiting[: self.max_num_seqs - len(self.running)]:
            seq.num_computed = self.size * len(self.blocks.match(seq))
        admitted = len(self.running)
        plan = super().admit()
        for seq in self.running[admitted:]:
            self.blocks.attach_cached(seq, self.blocks.match(seq))
        return plan

    def advance(self, seq: Sequence, end: int) -> None:
        super().advance(seq, end)
        self.blocks.cache_full_blocks(seq)
