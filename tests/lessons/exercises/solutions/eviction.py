"""A solution of `python -m lessons build eviction`."""

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence


class FewestHits(BlockManager):
    def _free_all(self) -> None:
        super()._free_all()
        self.hits = [0] * len(self.blocks)

    def attach_cached(self, seq: Sequence, matched: list[Block]) -> None:
        super().attach_cached(seq, matched)
        for block in matched:
            self.hits[block.block_id] += 1

    def _evict(self, block: Block) -> None:
        super()._evict(block)
        self.hits[block.block_id] = 0

    def choose_victim(self) -> int:
        return min(self.evictable, key=self.hits.__getitem__)
