"""HostCacheBlockManager: a BlockManager that saves evicted blocks to a cache in host memory.

It owns the index of the host blocks. Like BlockManager it copies no data: `fill_copies` puts the
copies between device and host into the plan, and features/memory/host_cache/pool.py executes them.

    device   owned --release--> evictable --eviction--> other content
               ^                    |
               | load (a match)     | save, unless host memory has a copy already
               |                    v
    host       +------------- host block --eviction, least recently used--> lost

A preempted sequence releases its blocks, and a later one may evict them. They are loaded when the
preempted sequence is matched again. This is the swapping of PagedAttention (arXiv:2309.06180,
section 4.5), block by block. The same mechanism keeps long conversations and shared prefixes.

A block has one serial number, parent and content in both caches, so that its children are found in
either. A loaded block keeps its copy in host memory, and needs no save when it is evicted again.

The runner executes the saves of a plan first, then the copies on the device, then the loads, and
then computes. A host block that a plan reads or writes is not reused within this plan.
"""

from collections import OrderedDict
from collections.abc import Iterable

from nanovllm.engine.block_manager import Block, BlockManager, Key
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import BlockCopy, StepPlan


class HostBlock(Block):
    """A cached block in host memory. `block_id` is its number there, and it has no owner."""

    __slots__ = ()


class HostCacheBlockManager(BlockManager):
    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        super().__init__(num_blocks, block_size)
        self.num_host_blocks = num_host_blocks
        self._empty_host()
        self.saved_blocks = self.loaded_blocks = self.lost_blocks = self.spared_tokens = 0
        # For the plan that is being made; see `fill_copies`.
        self._saves: list[BlockCopy] = []
        self._loads: list[BlockCopy] = []
        self._busy: set[int] = set()  # host blocks that its copies read or write

    def revert(self, seqs: Iterable[Sequence]) -> None:
        super().revert(seqs)
        self._saves, self._loads, self._busy = [], [], set()

    def _empty_host(self) -> None:
        # Key -> block, the least recently used first.
        self.host_index: OrderedDict[Key, HostBlock] = OrderedDict()
        self.host_free = list(range(self.num_host_blocks - 1, -1, -1))  # taken from the end

    def stats(self) -> dict[str, int]:
        """Return counters for `LLMEngine.stats`; docs/api.md explains them."""
        return {
            "host_blocks": len(self.host_index),
            "host_saves": self.saved_blocks,
            "host_loads": self.loaded_blocks,
            "host_evictions": self.lost_blocks,
            "host_spared_tokens": self.spared_tokens,
        }

    # ---- from the device to the host ----

    def _evict(self, block_id: int) -> None:
        self._save(self.blocks[block_id])
        super()._evict(block_id)

    def _save(self, block: Block) -> None:
        """Save a block that is about to be evicted, unless it is saved or no host block is left."""
        if block.key in self.host_index:
            self.host_index.move_to_end(block.key)
            return
        if not self.host_free:
            oldest = next(iter(self.host_index.values()))
            if oldest.block_id in self._busy:
                self.lost_blocks += 1
                return
            self._drop(oldest)
        host_id = self.host_free.pop()
        self.host_index[block.key] = HostBlock(host_id, serial=block.serial, key=block.key)
        self._busy.add(host_id)
        self._saves.append(BlockCopy(block.block_id, host_id))
        self.saved_blocks += 1

    def _drop(self, block: HostBlock) -> None:
        del self.host_index[block.key]
        self.host_free.append(block.block_id)
        self.lost_blocks += block.key not in self.prefix_index

    # ---- from the host to the device ----

    def _find(self, key: Key) -> Block | None:
        """Look up a block on the device, and then in host memory.

        A host block has no owner, so admission counts the device block that its load takes.
        """
        return super()._find(key) or self.host_index.get(key)

    def attach_cached(self, seq: Sequence, matched: list[Block]) -> None:
        """Set `seq.block_table` to cached blocks. Host blocks are loaded into device blocks."""
        on_host = [i for i, block in enumerate(matched) if isinstance(block, HostBlock)]
        # Taking a block can evict a block from either cache, but none of `matched`: its device
        # blocks get an owner first, and its host blocks are marked as busy.
        super().attach_cached(seq, [block for block in matched if not isinstance(block, HostBlock)])
        for i in reversed(on_host):  # as in `release`, so that the last is evicted first
            self._busy.add(matched[i].block_id)
            self.host_index.move_to_end(matched[i].key)
        for i in on_host:
            seq.block_table.insert(i, self._load(matched[i]))
        seq.num_cached_blocks = len(matched)
        seq.parent_serial = matched[-1].serial if matched else 0
        seq.num_computed = len(matched) * self.block_size
        if on_host:
            self.spared_tokens += (len(matched) - on_host[0]) * self.block_size

    def _load(self, host_block: Block) -> int:
        """Return a device block with one owner, into which the plan loads `host_block`."""
        block = self.blocks[self._take_block()]
        self._cache(block, host_block.key)
        self._loads.append(BlockCopy(host_block.block_id, block.block_id))
        self.loaded_blocks += 1
        return block.block_id

    # ---- both caches ----

    def _cache(self, block: Block, key: Key) -> None:
        """Cache a block. If host memory has a copy, the block gets the copy's serial number."""
        super()._cache(block, key)
        if key in self.host_index:
            block.serial = self.host_index[key].serial

    def reset_prefix_cache(self) -> None:
        """Remove every block from both caches."""
        super().reset_prefix_cache()
        self._empty_host()

    def fill_copies(self, plan: StepPlan) -> list[int]:
        plan.saves, plan.loads = self._saves, self._loads
        self._saves, self._loads, self._busy = [], [], set()
        return super().fill_copies(plan)
