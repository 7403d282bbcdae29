"""Prefix match: the cached blocks with which a new sequence begins.

The task. Write `match`: return the blocks of the prefix cache that hold the beginning of a
sequence, the first block first, up to the first that is not cached.

Example: blocks have 2 slots, and [5, 6] and, after it, [7, 8] are cached. [5, 6, 7, 8, 9] matches
two blocks. [5, 6, 7, 8] matches one: at least one token is computed, because its logits are needed.
[7, 8, 9] matches none, although there is a block with the tokens 7 and 8: it follows other tokens.

What must stay true:
  - A block is found by its tokens and its parent, the block before it. Block.serial is the serial
    number of a cached block. The parent of a first block has the number 0.
  - Nothing changes.

Where it goes. BlockManager.match in nanovllm/engine/block_manager.py. The check puts your class in
its place, and random requests run on it.

Hints: self._key(seq, i, parent) returns the key of logical block i of the sequence after the block
with the serial number `parent`. self.prefix_index maps a key to the number of a block, self.blocks
that to the Block. A logical block has self.block_size tokens.
"""

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence


class Matching(BlockManager):
    def match(self, seq: Sequence) -> list[Block]:
        raise NotImplementedError("match is to be written; see the top of this file")
