"""A solution of `python -m lessons build prefix`."""

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence


class Matching(BlockManager):
    def match(self, seq: Sequence) -> list[Block]:
        matched: list[Block] = []
        parent = b""
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            token_ids = seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
            parent = self.hash_block(parent, token_ids)
            block = self.hash_to_block.get(parent)
            if block is None or block.token_ids != token_ids:
                break
            matched.append(block)
        return matched
