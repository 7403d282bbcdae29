"""Prefix match: the cached blocks with which a new sequence begins.

The task. Write `match`: return the blocks of the prefix cache that hold the beginning of a
sequence, the first block first, up to the first that is not cached.

Example: blocks have 2 slots, and [5, 6] and, after it, [7, 8] are cached. [5, 6, 7, 8, 9] matches
two blocks. [5, 6, 7, 8] matches one: at least one token is computed, because its logits are needed.
[7, 8, 9] matches none, although there is a block with the tokens 7 and 8: it follows other tokens.

What must stay true:
  - A block is found by the hash of its tokens and of its parent's hash. The parent is the block
    before it; a first block has b"" in place of this hash.
  - Blocks with different tokens can have the same hash, so their tokens have to be compared.
  - A hash is looked up: a match does not go through the blocks, of which there may be thousands.
  - `match` changes no block and no sequence, except that it may fill seq.block_hashes.

In the engine: match in nanovllm/engine/block_manager.py. Hints: a block has self.block_size slots.
self.hash_block(parent_block_hash, token_ids) returns its hash. self.hash_to_block[block_hash] is
the Block with this hash, if it is cached, and Block.token_ids are its tokens.
"""

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence


class Matching(BlockManager):
    def match(self, seq: Sequence) -> list[Block]:
        raise NotImplementedError("match is to be written; see the top of this file")
