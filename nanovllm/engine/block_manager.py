"""BlockManager: records which sequences own each block of the KV cache, and what the block holds.

It owns the pool of blocks and the prefix index, and updates the block fields of sequences. It
copies no data. The time of an operation is proportional to the number of blocks that it changes.
Paging and copy-on-write follow PagedAttention (Kwon et al. 2023, arXiv:2309.06180).

From a token to its memory, with a block size of 4:

    token_ids    [ t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 ]     logical blocks 0, 1, 2
    block_table  [     7             2           5   ]     physical blocks
    slot of t9 = block_table[9 // 4] * 4 + 9 % 4 = 5 * 4 + 1 = 21

Every block except block 0, the null block, is in exactly one of three states:

    owned      ref_count > 0: it appears in that many block tables
    evictable  ref_count = 0 and cached: its content can be shared until it is evicted
    free       ref_count = 0 and not cached

A cached block has a serial number, which is never reused. Its key in the prefix index is the serial
number of its parent, which is the block before it, and its token ids. Blocks with equal keys
therefore have equal prefixes. Two prompts with a common prefix:

    block 3 [ a b ] serial 1, key (0, a b) <--+-- block 5 [ c d ] serial 2, key (1, c d)
                                              +-- block 8 [ x y ] serial 3, key (1, x y)

After block 3 is evicted, blocks 5 and 8 are still cached, but no prompt matches them. If [ a b ] is
computed again, its block has serial number 4, and the next block of [ c d ] has the key (4, c d).
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from nanovllm.engine.sequence import Sequence
from nanovllm.plan import BlockCopy, StepPlan

# The serial number of the parent, which is 0 for a first block, and the token ids as uint32.
Key: TypeAlias = tuple[int, bytes]


@dataclass(slots=True)
class Block:
    block_id: int
    ref_count: int = 0
    # Set while the block is cached.
    serial: int = 0  # serial number; 0 if not cached
    key: Key = (0, b"")


class BlockManager:
    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        """Create `num_blocks` blocks for sequences, numbered from 1, and the null block 0."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.evictions = 0
        self.num_resets = 0  # of the prefix cache
        self._last_serial = 0
        self._free_all()

    def _free_all(self) -> None:
        self.blocks = [Block(i) for i in range(self.num_blocks + 1)]
        self.free = list(range(self.num_blocks, 0, -1))  # taken from the end
        self.evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.prefix_index: dict[Key, int] = {}  # key -> block id
        # For the plan that is being made; see `fill_copies`.
        self._copies: list[BlockCopy] = []
        self._evicted: list[int] = []

    @property
    def num_available(self) -> int:
        """Number of blocks that no sequence owns."""
        return len(self.free) + len(self.evictable)

    # ---- the prefix cache ----

    def match(self, seq: Sequence) -> list[Block]:
        """Return the cached blocks that hold the beginning of `seq`. Changes nothing.

        The block of the last token is not matched, because the logits of this token must be
        computed. If all other blocks match, 1 to `block_size` tokens remain to be computed. If
        `seq` has targets, the token before the first target and all later tokens remain too.
        """
        matched: list[Block] = []
        parent = 0
        end = seq.first_target - 1 if seq.targets else len(seq.token_ids) - 1
        for i in range(end // self.block_size):
            block = self._find(self._key(seq, i, parent))
            if block is None:
                break
            matched.append(block)
            parent = block.serial
        return matched

    def _key(self, seq: Sequence, i: int, parent: int) -> Key:
        """Return the key of logical block `i` of `seq`. `parent` is a serial number."""
        token_ids = seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
        return (parent, array("I", token_ids).tobytes())

    def _find(self, key: Key) -> Block | None:
        """Return the cached block with this key, if any."""
        block_id = self.prefix_index.get(key)
        return None if block_id is None else self.blocks[block_id]

    def is_ready(self, matched: list[Block]) -> bool:
        """Return whether a sequence that is admitted now can continue after `matched`.

        A subclass may have to wait for the step that is being planned.
        """
        return True

    def record_computed(self, seq: Sequence, start: int) -> None:
        """Record that the plan computes `seq` from position `start` to `seq.num_computed`."""
        self.cache_full_blocks(seq)

    def cache_full_blocks(self, seq: Sequence) -> None:
        """Cache every full block of `seq` whose tokens are known and whose KV is computed.

        "Computed" includes the plan being made, because each layer stores K and V of the whole
        step before any query attends. Sequences of the same step can therefore share a block.

        A sequence that began before the last reset of the prefix cache caches no more blocks,
        because its later blocks depend on KV that was computed before the reset.
        """
        full = min(seq.num_computed, len(seq.token_ids)) // self.block_size
        if not self.enable_prefix_caching or seq.num_cached_blocks >= full:
            return
        if seq.began_after != self.num_resets:
            return
        for i in range(seq.num_cached_blocks, full):
            key = self._key(seq, i, seq.parent_serial)
            if key not in self.prefix_index:
                self._cache(self.blocks[seq.block_table[i]], key)
            seq.parent_serial = self.blocks[self.prefix_index[key]].serial
            seq.num_cached_blocks += 1

    def _cache(self, block: Block, key: Key) -> None:
        if block.serial:  # it is cached with another parent serial, for a fork that shares it
            self._uncache(block)
        self._last_serial += 1
        block.serial = self._last_serial
        block.key = key
        self.prefix_index[key] = block.block_id

    def _uncache(self, block: Block) -> None:
        if block.block_id in self.evictable:
            del self.evictable[block.block_id]
            self.free.append(block.block_id)
        del self.prefix_index[block.key]
        block.serial = 0

    def revert(self, seqs: Iterable[Sequence]) -> None:
        """Free all blocks after a failure, whatever their state, and clear the fields of `seqs`."""
        self._free_all()
        self.reset_prefix_cache()
        for seq in seqs:
            self._forget_blocks(seq)

    def reset_prefix_cache(self) -> None:
        """Remove every block from the prefix cache. Sequences keep the blocks that they own."""
        self.num_resets += 1
        for block_id in list(self.prefix_index.values()):
            self._uncache(self.blocks[block_id])

    # ---- ownership ----

    def num_needed(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many more blocks `seq` needs for `num_tokens`, including a copy-on-write."""
        num_blocks = -(-num_tokens // self.block_size)
        return num_blocks - len(seq.block_table) + (self._shared_block(seq) is not None)

    def attach_cached(self, seq: Sequence, matched: list[Block]) -> None:
        """Set `seq.block_table` to cached blocks. The step being planned may compute their KV."""
        for block in matched:
            if block.ref_count == 0:
                del self.evictable[block.block_id]
            block.ref_count += 1
        seq.block_table = [block.block_id for block in matched]
        seq.num_cached_blocks = len(matched)
        seq.parent_serial = matched[-1].serial if matched else 0
        seq.num_computed = len(matched) * self.block_size
        seq.began_after = self.num_resets

    def can_fork(self, parent: Sequence, num_computed: int) -> bool:
        """Return whether `fork` is possible. If not, the child is admitted like a new sequence."""
        return True

    def fork(self, parent: Sequence, child: Sequence, num_computed: int) -> None:
        """Share the blocks of the first `num_computed` tokens of `parent` with `child`.

        The sequence that first writes to the last of these blocks copies it.
        """
        child.block_table = parent.block_table[: -(-num_computed // self.block_size)]
        for block_id in child.block_table:
            self.blocks[block_id].ref_count += 1
        child.num_computed = num_computed
        child.began_after = parent.began_after
        if parent.num_cached_blocks <= num_computed // self.block_size:
            child.num_cached_blocks = parent.num_cached_blocks
            child.parent_serial = parent.parent_serial
        child.needs_copy_on_write = parent.needs_copy_on_write = True

    def _shared_block(self, seq: Sequence) -> Block | None:
        """Return the block that `seq` writes next if it must be copied first, else None.

        A cached block counts as shared even if no other sequence owns it, because its content must
        not differ from its entry in the prefix index.
        """
        i = seq.num_computed // self.block_size
        if not seq.needs_copy_on_write or i >= len(seq.block_table):
            return None
        block = self.blocks[seq.block_table[i]]
        return None if block.ref_count == 1 and not block.serial else block

    def copy_on_write(self, seq: Sequence) -> int | None:
        """Copy the block that `seq` writes next if it is shared. Returns the copy, or None."""
        shared = self._shared_block(seq)
        seq.needs_copy_on_write = False
        if shared is None:
            return None
        self._release_block(shared)
        copy = self._take_block()
        self._copies.append(BlockCopy(shared.block_id, copy))
        seq.block_table[seq.num_computed // self.block_size] = copy
        return copy

    def append_block(self, seq: Sequence) -> int:
        """Append a block to the block table of `seq` and return it."""
        seq.block_table.append(self._take_block())
        return seq.block_table[-1]

    def choose_victim(self) -> int:
        """Return the block that `_take_block` evicts next: the least recently used one."""
        return next(iter(self.evictable))

    def stats(self) -> dict[str, int]:
        """Return further counters for `LLMEngine.stats`, which subclasses may have."""
        return {}

    def _take_block(self) -> int:
        """Return a block with one owner. Evicts a cached block if none is free."""
        if not self.free:
            self._evict(self.choose_victim())
        block_id = self.free.pop()
        self.blocks[block_id].ref_count = 1
        return block_id

    def _evict(self, block_id: int) -> None:
        """Free an evictable block. Its content is lost, unless the host cache saves it."""
        self._uncache(self.blocks[block_id])
        self.evictions += 1
        self._evicted.append(block_id)

    def fill_copies(self, plan: StepPlan) -> list[int]:
        """Put the pending copies into `plan`. Returns the blocks that were evicted for it."""
        plan.block_copies = self._copies
        evicted = self._evicted
        self._copies, self._evicted = [], []
        return evicted

    def _release_block(self, block: Block) -> None:
        block.ref_count -= 1
        if block.ref_count == 0 and block.serial:
            self.evictable[block.block_id] = None
        elif block.ref_count == 0:
            self.free.append(block.block_id)

    def release(self, seq: Sequence) -> None:
        """Release the blocks of `seq`, last to first, so that shared prefixes are evicted last."""
        for block_id in reversed(seq.block_table):
            self._release_block(self.blocks[block_id])
        self._forget_blocks(seq)

    def _forget_blocks(self, seq: Sequence) -> None:
        seq.block_table = []
        seq.needs_copy_on_write = False
        seq.num_computed = seq.num_cached_blocks = seq.parent_serial = 0
