"""A solution of `nanovllm lessons build prefix`."""

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence


class Matching(BlockManager):
    def match(self, seq: Sequence) -> list[Block]:
        matched: list[Block] = []
        if not self.enable_prefix_caching:
            return matched
        self.hash_blocks(seq)
        parent = 0
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            number = self.prefix_index.get(seq.block_hashes[i])
            if number is None:
                break
            block = self.blocks[number]
            if block.token_ids != self._token_bytes(seq, i) or block.parent_serial != parent:
                break
            matched.append(block)
            parent = block.serial
        return matched
