"""HostCacheBlockManager: a BlockManager that saves evicted blocks to a cache in host memory.

It owns the index of the host blocks. Like BlockManager it copies no data: `fill_copies` puts the
copies between device and host into the plan, and features/kv/host_cache/pool.py executes them.

    device   owned --release--> evictable --eviction--> other content
               ^                    |
               | load (a match)     | save, unless host memory has a copy already
               |                    v
    host       +------------- host block --eviction, least recently used--> lost

A preempted sequence releases its blocks, and a later one may evict them. They are loaded when the
preempted sequence is matched again. This is the swapping of PagedAttention (arXiv:2309.06180,
section 4.5), block by block.

A block has the same hash in both caches, so that its children are found in either. A loaded block
keeps its copy in host memory, and needs no save when it is evicted again.

The runner executes the saves of a plan first, then the copies on the device, then the loads, and
then computes. A host block that a plan reads or writes is not reused within this plan.
"""

from collections import OrderedDict

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import BlockCopy, StepPlan


class HostBlock(Block):
    """A cached block in host memory. `block_id` is its number there, and it has no owner."""

    __slots__ = ()


class HostCacheBlockManager(BlockManager):
    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self.num_host_blocks = num_host_blocks
        self.saved_blocks = self.loaded_blocks = self.lost_blocks = self.spared_tokens = 0
        super().__init__(num_blocks, block_size)

    def _free_all(self) -> None:
        super()._free_all()
        # The least recently used block is the first.
        self.hash_to_host_block: OrderedDict[bytes, HostBlock] = OrderedDict()
        self.host_free = list(range(self.num_host_blocks - 1, -1, -1))  # taken from the end
        # These belong to the plan that is being made; see `fill_copies`.
        self._saves: list[BlockCopy] = []
        self._loads: list[BlockCopy] = []
        self._busy: set[int] = set()  # host blocks that its copies read or write

    def stats(self) -> dict[str, int]:
        """Return counters for `LLMEngine.stats`; docs/api.md explains them."""
        return {
            "host_blocks": len(self.hash_to_host_block),
            "host_saves": self.saved_blocks,
            "host_loads": self.loaded_blocks,
            "host_evictions": self.lost_blocks,
            "host_spared_tokens": self.spared_tokens,
        }

    # ---- from the device to the host ----

    def _evict(self, block: Block) -> None:
        self._save(block)
        super()._evict(block)

    def _save(self, block: Block) -> None:
        """Save a block that is about to be evicted, unless it is saved or no host block is left."""
        if block.block_hash in self.hash_to_host_block:
            self.hash_to_host_block.move_to_end(block.block_hash)
            return
        if not self.host_free:
            oldest = next(iter(self.hash_to_host_block.values()))
            if oldest.block_id in self._busy:
                self.lost_blocks += 1
                return
            self._drop(oldest)
        host_id = self.host_free.pop()
        content = block.block_hash, block.token_ids, block.parent_block_hash
        self.hash_to_host_block[block.block_hash] = HostBlock(host_id, 0, *content)
        self._busy.add(host_id)
        self._saves.append(BlockCopy(block.block_id, host_id))
        self.saved_blocks += 1

    def _drop(self, block: HostBlock) -> None:
        del self.hash_to_host_block[block.block_hash]
        self.host_free.append(block.block_id)
        self.lost_blocks += block.block_hash not in self.hash_to_block

    # ---- from the host to the device ----

    def find(self, block_hash: bytes) -> Block | None:
        """Look up a block on the device, and then in host memory.

        A host block has no owner, so admission counts the device block that its load takes.
        """
        return super().find(block_hash) or self.hash_to_host_block.get(block_hash)

    def attach_cached(self, seq: Sequence, matched: list[Block]) -> None:
        """Set `seq.block_table` to cached blocks. Host blocks are loaded into device blocks."""
        on_host = [i for i, block in enumerate(matched) if isinstance(block, HostBlock)]
        # Taking a block can evict a block from either cache, but none of `matched`: its device
        # blocks get an owner first, and its host blocks are marked as busy.
        super().attach_cached(seq, [block for block in matched if not isinstance(block, HostBlock)])
        for i in reversed(on_host):  # as in `release`, so that the last is evicted first
            self._busy.add(matched[i].block_id)
            self.hash_to_host_block.move_to_end(matched[i].block_hash)
        for i in on_host:
            seq.block_table.insert(i, self._load(matched[i]))
        seq.num_cached_blocks = len(matched)
        seq.num_computed = len(matched) * self.block_size
        if on_host:
            self.spared_tokens += (len(matched) - on_host[0]) * self.block_size

    def _load(self, host_block: Block) -> int:
        """Return a device block with one owner, into which the plan loads `host_block`."""
        block = self.blocks[self._take_block()]
        content = host_block.block_hash, host_block.token_ids, host_block.parent_block_hash
        self.cache(block, *content)
        self._loads.append(BlockCopy(host_block.block_id, block.block_id))
        self.loaded_blocks += 1
        return block.block_id

    def fill_copies(self, plan: StepPlan) -> list[int]:
        plan.saves, plan.loads = self._saves, self._loads
        self._saves, self._loads, self._busy = [], [], set()
        return super().fill_copies(plan)
