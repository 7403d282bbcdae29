"""A solution of `python -m lessons build prefix`."""

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence


class Matching(BlockManager):
    def match(self, seq: Sequence) -> list[Block]:
        matched: list[Block] = []
        parent = 0
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            number = self.prefix_index.get(self._key(seq, i, parent))
            if number is None:
                break
            block = self.blocks[number]
            matched.append(block)
            parent = block.serial
        return matched
