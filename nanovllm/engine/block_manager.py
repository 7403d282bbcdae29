"""BlockManager: records the owners and the content of each block of the KV cache.

It owns the pool of blocks and the prefix cache, and updates the block fields of sequences. It
copies no data. Paging and copy-on-write follow PagedAttention (Kwon et al. 2023, arXiv:2309.06180).

From a token to its memory, with a block size of 4:

    token_ids    [ t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 ]     logical blocks 0, 1, 2
    block_table  [     7             2           5   ]     physical blocks
    slot of t9 = block_table[9 // 4] * 4 + 9 % 4 = 5 * 4 + 1 = 21

Every block except block 0, the null block, is in exactly one of three states:

    owned      ref_count > 0: it appears in that many block tables
    evictable  ref_count = 0 and cached: its content can be shared until it is evicted
    free       ref_count = 0 and not cached

The keys and values of a block depend on its tokens and on all tokens before it. A full block is
therefore cached under a hash of both, as in vLLM and nano-vllm:

    block_hash = xxh3_128(block_hash of the block before it, its token ids)

    [ a b ] hash 51.. <--+-- [ c d ] hash 0e..     two prompts with a common prefix
                         +-- [ x y ] hash 9f..

If [ a b ] is evicted, its children stay cached, and match again after [ a b ] is computed again.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from xxhash import xxh3_128_digest

from nanovllm.engine.sequence import Sequence
from nanovllm.plan import BlockCopy, StepPlan


@dataclass(slots=True)
class Block:
    block_id: int
    ref_count: int = 0
    # These fields are set while the block is cached.
    block_hash: bytes = b""
    token_ids: list[int] = field(default_factory=list)
    parent_block_hash: bytes = b""  # of the block before it, if any

    @property
    def is_cached(self) -> bool:
        return bool(self.block_hash)


class BlockManager:
    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        """Create `num_blocks` blocks for sequences, numbered from 1, and the null block 0."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.evictions = 0
        self._free_all()

    def _free_all(self) -> None:
        """Make every block free."""
        self.blocks = [Block(i) for i in range(self.num_blocks + 1)]
        self.free = list(range(self.num_blocks, 0, -1))  # taken from the end
        self.evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.hash_to_block: dict[bytes, Block] = {}  # the prefix cache
        # These belong to the plan that is being made; see `fill_copies`.
        self._copies: list[BlockCopy] = []
        self._evicted: list[int] = []

    @property
    def num_available(self) -> int:
        """Number of blocks that no sequence owns."""
        return len(self.free) + len(self.evictable)

    # ---- the prefix cache ----

    def match(self, seq: Sequence) -> list[Block]:
        """Return the cached blocks that hold the beginning of `seq`. Changes no block.

        The block of the last token is not matched, because the logits of this token must be
        computed. The same holds for the token before the first of `seq.targets`.
        """
        matched: list[Block] = []
        end = seq.first_target - 1 if seq.targets else len(seq.token_ids) - 1
        for i in range(end // self.block_size):
            block = self.find(self.block_hash(seq, i))
            # Blocks with different tokens can have the same hash.
            if block is None or block.token_ids != self._token_ids(seq, i):
                break
            matched.append(block)
        return matched

    def block_hash(self, seq: Sequence, i: int) -> bytes:
        """Return the hash of logical block `i` of `seq`, whose tokens are all known."""
        hashes = seq.block_hashes  # each is computed once
        for j in range(len(hashes), i + 1):
            parent_block_hash = hashes[-1] if hashes else b""
            hashes.append(self.hash_block(parent_block_hash, self._token_ids(seq, j)))
        return hashes[i]

    def hash_block(self, parent_block_hash: bytes, token_ids: list[int]) -> bytes:
        """Return the hash of a full block: 16 bytes."""
        return xxh3_128_digest(parent_block_hash + array("I", token_ids).tobytes())

    def _token_ids(self, seq: Sequence, i: int) -> list[int]:
        return seq.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def find(self, block_hash: bytes) -> Block | None:
        """Return the cached block with this hash, if any."""
        return self.hash_to_block.get(block_hash)

    def cache_full_blocks(self, seq: Sequence) -> None:
        """Cache every full block of `seq` whose tokens are known and whose KV is computed.

        "Computed" includes the plan being made, because each layer stores K and V of the whole
        step before any query attends. Sequences of the same step can therefore share a block.
        """
        if not self.enable_prefix_caching:
            return
        full = min(seq.num_computed, len(seq.token_ids)) // self.block_size
        for i in range(seq.num_cached_blocks, full):
            block_hash = self.block_hash(seq, i)
            if block_hash not in self.hash_to_block:
                block = self.blocks[seq.block_table[i]]
                parent_block_hash = seq.block_hashes[i - 1] if i else b""
                self.cache(block, block_hash, self._token_ids(seq, i), parent_block_hash)
            seq.num_cached_blocks += 1

    def cache(
        self, block: Block, block_hash: bytes, token_ids: list[int], parent_block_hash: bytes
    ) -> None:
        block.block_hash = block_hash
        block.token_ids = token_ids
        block.parent_block_hash = parent_block_hash
        self.hash_to_block[block_hash] = block

    # ---- ownership ----

    def num_needed(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many more blocks `seq` needs for `num_tokens`, including a copy-on-write."""
        num_blocks = -(-num_tokens // self.block_size)
        return num_blocks - len(seq.block_table) + (self._shared_block(seq) is not None)

    def attach_cached(self, seq: Sequence, matched: list[Block]) -> None:
        """Set `seq.block_table` to cached blocks, whose KV this step may compute."""
        for block in matched:
            if block.ref_count == 0:
                del self.evictable[block.block_id]
            block.ref_count += 1
        seq.block_table = [block.block_id for block in matched]
        seq.num_cached_blocks = len(matched)
        seq.num_computed = len(matched) * self.block_size

    def append_block(self, seq: Sequence) -> int:
        """Append a block to the block table of `seq` and return it."""
        seq.block_table.append(self._take_block())
        return seq.block_table[-1]

    def choose_victim(self) -> int:
        """Return the block that `_take_block` evicts next: the least recently used one."""
        return next(iter(self.evictable))

    def _take_block(self) -> int:
        """Return a block with one owner. Evicts a cached block if none is free."""
        if not self.free:
            self._evict(self.blocks[self.choose_victim()])
        block_id = self.free.pop()
        self.blocks[block_id].ref_count = 1
        return block_id

    def _evict(self, block: Block) -> None:
        """Free an evictable block. Its content is lost, unless the host cache saves it."""
        del self.hash_to_block[block.block_hash]
        block.block_hash = b""
        del self.evictable[block.block_id]
        self.free.append(block.block_id)
        self.evictions += 1
        self._evicted.append(block.block_id)

    def fill_copies(self, plan: StepPlan) -> list[int]:
        """Put the pending copies into `plan`. Returns the blocks that were evicted for it."""
        plan.block_copies = self._copies
        evicted = self._evicted
        self._copies, self._evicted = [], []
        return evicted

    def _release_block(self, block: Block) -> None:
        block.ref_count -= 1
        if block.ref_count == 0 and block.is_cached:
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
        seq.num_computed = seq.num_cached_blocks = 0
        del seq.block_hashes[len(seq.token_ids) // self.block_size :]  # of removed tokens

    def revert(self, seqs: Iterable[Sequence]) -> None:
        """Free all blocks after a failure, whatever their state, and clear the fields of `seqs`."""
        self._free_all()
        for seq in seqs:
            self._forget_blocks(seq)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False and changes nothing if a sequence owns a block."""
        if self.num_available < self.num_blocks:
            return False
        self._free_all()
        return True

    # ---- forks, and what subclasses change ----

    def can_fork(self, parent: Sequence, num_computed: int) -> bool:
        """Return whether `fork` is possible. If not, the child is admitted like a new sequence."""
        return True

    def fork(self, parent: Sequence, child: Sequence, num_computed: int) -> None:
        """Share the blocks of the first `num_computed` tokens of `parent` with `child`."""
        child.block_table = parent.block_table[: -(-num_computed // self.block_size)]
        for block_id in child.block_table:
            self.blocks[block_id].ref_count += 1
        child.num_computed = num_computed
        full = num_computed // self.block_size
        child.block_hashes = parent.block_hashes[:full]
        child.num_cached_blocks = min(parent.num_cached_blocks, full)
        child.needs_copy_on_write = parent.needs_copy_on_write = True

    def _shared_block(self, seq: Sequence) -> Block | None:
        """Return the block that `seq` writes next if it must be copied first, else None."""
        i = seq.num_computed // self.block_size
        if not seq.needs_copy_on_write or i >= len(seq.block_table):
            return None
        block = self.blocks[seq.block_table[i]]
        # A cached block counts as shared, because its content must not differ from its hash.
        return None if block.ref_count == 1 and not block.is_cached else block

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

    def is_ready(self, matched: list[Block]) -> bool:
        """Return whether a sequence that is admitted now can continue after `matched`."""
        return True

    def cache_blocks(self, seq: Sequence, start: int) -> None:
        """Cache the blocks of `seq` that the plan fills, from `start` to `seq.num_computed`."""
        self.cache_full_blocks(seq)

    def stats(self) -> dict[str, int]:
        """Return the counters that a subclass adds to `LLMEngine.stats`."""
        return {}
