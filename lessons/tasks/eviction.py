"""An eviction rule: the block with the fewest prefix hits first.

The task. When no block is free, the block manager evicts the least recently used block that no
sequence owns. One long scan of new prompts then evicts everything, including a system prompt that
half of the requests begin with. Write the rule "least frequently used": evict the block with the
fewest hits.

A hit is one sequence that takes a cached block for its beginning, in BlockManager.attach_cached.
Example: a block with the system prompt was computed by one request and shared by three others, so
it has 3 hits. Two blocks of a document that one request computed have 0 hits. Both are evicted
before it, and of the two the one that was used less recently.

What must stay true:
  - choose_victim returns a block of self.evictable, and changes nothing.
  - Among blocks with equally many hits, the least recently used one is evicted first.
  - Hits belong to the content of a block. A block that is evicted and filled with other content
    starts at 0. A block keeps its hits when sequences take it and when they release it.

Where it goes. BlockManager.choose_victim in nanovllm/engine/block_manager.py is the one place
where the victim is chosen. Your class overrides it, and whatever else it needs to count hits.

Hints: self.evictable iterates over block indices, the least recently used first, and min() returns
the first of equal ones. Block.block_hash is the hash of the content of a cached block.
"""

from nanovllm.engine.block_manager import BlockManager


class FewestHits(BlockManager):
    def choose_victim(self) -> int:
        """The evictable block that is evicted next."""
        raise NotImplementedError("choose_victim is to be written; see the top of this file")
