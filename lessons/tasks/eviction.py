"""An eviction rule: the block with the fewest prefix hits first.

The task. The block manager evicts the least recently used block that no sequence owns. Many
new prompts, each used once, then evict a system prompt that half of the requests begin with. Write
the rule "least frequently used": evict the block with the fewest hits. A hit is one sequence, new
or resumed, that takes a cached block for its beginning, in BlockManager.attach_cached.

Example: a block that one request computed and three others shared has 3 hits. Two blocks that only
one request used have none. They are evicted first, the less recently used one before the other.

What must stay true:
  - choose_victim returns a block of self.evictable, and changes nothing.
  - Hits belong to the content of a block: they stay when a sequence releases it, and are lost when
    it is evicted, or by reset_prefix_cache. What the block holds next starts at 0, and the same
    content, when it is computed again, too.

In the engine: BlockManager in nanovllm/engine/block_manager.py. Your class overrides choose_victim,
and whatever else it needs to count hits. Hints: self.evictable iterates over block ids, the
least recently used first, and min() returns the first of equal ones. Block.block_hash is the hash
of the content of a cached block; `_evict` clears it, and `_free_all` makes all blocks new.
"""

from nanovllm.engine.block_manager import BlockManager


class FewestHits(BlockManager):
    def choose_victim(self) -> int:
        """The evictable block that is evicted next."""
        raise NotImplementedError("choose_victim is to be written; see the top of this file")
