"""Prefix match: the cached blocks with which a new sequence begins.

The task. Write `match`: return the blocks of the prefix cache that hold the beginning of a
sequence, the first block first, up to the first that is not cached.

Example: blocks have 2 slots, and [5, 6] and, after it, [7, 8] are cached. [5, 6, 7, 8, 9] matches
two blocks. [5, 6, 7, 8] matches one: at least one token is computed, because its logits are needed.
[7, 8, 9] matches none, although there is a block with the tokens 7 and 8: it follows other tokens.

What must stay true:
  - A block is found by its hash, which depends on its tokens and on the hash of the block before
    it, the parent. The parent hash of a first block is b"".
  - Blocks with different tokens can have the same hash, so their tokens have to be compared.
  - `match` must not change any state.

Where it goes. BlockManager.match in nanovllm/engine/block_manager.py, which also leaves out tokens
whose log-probabilities are requested. The check puts your class in its place, and random requests
run on it.

Hints: self.hash_block(parent_block_hash, token_ids) returns the hash of a block.
self.hash_to_block[block_hash] is the Block with this hash, if it is cached. Block.token_ids are its
tokens. A logical block has self.block_size tokens.
"""

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence


class Matching(BlockManager):
    def match(self, seq: Sequence) -> list[Block]:
        raise NotImplementedError("match is to be written; see the top of this file")
