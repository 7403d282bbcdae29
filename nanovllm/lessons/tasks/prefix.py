"""Prefix match: the cached blocks with which a new sequence begins.

The task. Write `match`: return the blocks of the prefix cache that hold the beginning of a
sequence, the first block first, up to the first that is not cached.

Example: blocks have 2 slots, and [5, 6] and, after it, [7, 8] are cached. [5, 6, 7, 8, 9] matches
two blocks. [5, 6, 7, 8] matches one: at least one token is computed, because its logits are needed.
[7, 8, 9] matches none, although there is a block with the tokens 7 and 8: it follows other tokens.

What must stay true:
  - A hash only says where to look. Different blocks may have the same hash, so compare the token
    ids and the parent too. Block.parent_serial is the serial number of the block before it, and 0
    for a first block.
  - Only the hashes of `seq` change. Without enable_prefix_caching nothing matches.

Where it goes. BlockManager.match in nanovllm/engine/block_manager.py. The check puts your class in
its place, and random requests run on it, half of them with hashes of 3 bits.

Hints: self.hash_blocks(seq) fills seq.block_hashes, one for each self.block_size of seq.token_ids.
self.prefix_index maps a hash to the number of a block, self.blocks that to the Block.
Block.token_ids are bytes. self._token_bytes(seq, i) returns the bytes for logical block i of the
sequence.
"""

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence


class Matching(BlockManager):
    def match(self, seq: Sequence) -> list[Block]:
        raise NotImplementedError("match is to be written; see the top of this file")
