"""A solution of `python -m lessons build eviction`."""

from typing import Any

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence


class FewestHits(BlockManager):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.hits = [0] * len(self.blocks)

    def attach_cached(self, seq: Sequence, matched: list[Block]) -> None:
        super().attach_cached(seq, matched)
        for block in matched:
            self.hits[block.block_id] += 1

    def _uncache(self, block: Block) -> None:
        super()._uncache(block)
        self.hits[block.block_id] = 0

    def choose_victim(self) -> int:
        return min(self.evictable, key=self.hits.__getitem__)
