"""BlockManager: which block of the KV cache belongs to which sequences, and what it holds.

It owns the pool of blocks and the prefix index, and changes the block fields of the sequences that
it is given. It moves no data. Every operation costs O(number of blocks it touches). Paging and
copy-on-write follow PagedAttention (Kwon et al. 2023, arXiv:2309.06180).

From a token to its memory, with a block size of 4:

    token_ids    [ t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 ]     logical blocks 0, 1, 2
    block_table  [     7             2           5   ]     physical blocks
    slot of t9 = block_table[9 // 4] * 4 + 9 % 4 = 5 * 4 + 1 = 21

A block is in one of three states, which partition the pool. Block 0, the null block, is in none.

    owned      ref_count > 0: it appears in that many block tables
    evictable  ref_count = 0 and cached: its content can still be shared until it is evicted
    free       ref_count = 0 and not cached

A full block is cached in the prefix index under hash = xxh64(hash of the block before it, its token
ids), so that equal hashes mean equal prefixes. A hash is only a hint: a match also compares the
token ids and the identity of the parent block, a number that is never reused. The prefix index is
therefore correct with any hash function. Two prompts with a common beginning, as chains:

    block 3 [ a b ] identity 1, parent 0  <--+-- block 5 [ c d ] identity 2, parent 1
                                             +-- block 8 [ x y ] identity 3, parent 1

After block 3 was evicted, 5 and 8 are still cached, but a match cannot reach them. If [ a b ] is
computed again, its block has the identity 4, and blocks 5 and 8 still do not match: their parent is 1.
They are evicted in their turn, or replaced when [ c d ] or [ x y ] is cached again.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from xxhash import xxh64_intdigest

from nanovllm.engine.sequence import Sequence
from nanovllm.plan import BlockMove, StepPlan


@dataclass(slots=True)
class Block:
    block_id: int
    ref_count: int = 0
    # Set while the block is cached.
    identity: int = 0  # never reused; 0 means not cached, and is the parent of a first block
    parent: int = 0  # identity of the block before it
    hash: int = 0
    token_ids: bytes = b""

    def holds(self, parent: int, token_ids: bytes) -> bool:
        """Whether its content is these tokens after those of the block with identity `parent`."""
        return self.parent == parent and self.token_ids == token_ids


class BlockManager:
    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        """`num_blocks` blocks for sequences, numbered from 1. The null block 0 is additional."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.evictions = 0
        self.num_resets = 0  # of the prefix cache
        self._last_identity = 0
        self._free_all()

    def _free_all(self) -> None:
        self.blocks = [Block(i) for i in range(self.num_blocks + 1)]
        self.free = list(range(self.num_blocks, 0, -1))  # taken from the end
        self.evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.prefix_index: dict[int, int] = {}  # hash -> block id
        # For the plan that is being made; see take_moves.
        self._moves: list[BlockMove] = []
        self._evicted: list[int] = []

    @property
    def num_available(self) -> int:
        """Blocks that no sequence owns."""
        return len(self.free) + len(self.evictable)

    # ---- the prefix cache ----

    def hash_blocks(self, seq: Sequence) -> None:
        """Extend `seq.block_hashes` to one hash for each full block of known tokens."""
        done, size = len(seq.block_hashes), self.block_size
        full = len(seq.token_ids) // size
        if done == full:
            return
        parent = seq.block_hashes[-1] if done else 0
        if not done:
            seq.block_hashes = []
        data = array("I", seq.token_ids[done * size : full * size]).tobytes()
        for start in range(0, len(data), size * 4):
            parent = self._hash(parent, data[start : start + size * 4])
            seq.block_hashes.append(parent)

    @staticmethod
    def _hash(parent: int, tokens: bytes) -> int:
        return xxh64_intdigest(parent.to_bytes(8, "little") + tokens)

    def match(self, seq: Sequence) -> list[Block]:
        """Return the cached blocks that hold the beginning of `seq`. Changes only its hashes.

        The block of its last token is not matched, because the logits of that token are needed: at
        least 1 and at most `block_size` tokens remain to be computed.
        """
        matched: list[Block] = []
        if not self.enable_prefix_caching:
            return matched
        self.hash_blocks(seq)
        parent = 0
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            block = self._find(seq, i, parent)
            if block is None:
                break
            matched.append(block)
            parent = block.identity
        return matched

    def _find(self, seq: Sequence, i: int, parent: int) -> Block | None:
        """What `match` takes for logical block `i`. features/host_tier/blocks.py also looks in host memory."""
        return self._lookup(seq, i, parent)

    def _lookup(self, seq: Sequence, i: int, parent: int) -> Block | None:
        """Return the cached block with the content of logical block `i` of `seq`, if any."""
        block_id = self.prefix_index.get(seq.block_hashes[i])
        if block_id is None or not self.blocks[block_id].holds(parent, self._token_bytes(seq, i)):
            return None
        return self.blocks[block_id]

    def _token_bytes(self, seq: Sequence, i: int) -> bytes:
        return array("I", seq.token_ids[i * self.block_size : (i + 1) * self.block_size]).tobytes()

    def cache_full_blocks(self, seq: Sequence) -> None:
        """Cache every block of `seq` whose tokens are known and whose KV is computed.

        "Computed" includes the plan being made, because each layer stores K and V of the whole
        step before any query attends. Sequences of the same step can therefore share a block.

        A sequence that began before the last reset of the prefix cache caches nothing more, because
        its later blocks depend on what it computed before.
        """
        full = min(seq.num_computed, len(seq.token_ids)) // self.block_size
        if not self.enable_prefix_caching or seq.num_cached_blocks >= full:
            return
        if seq.began_after != self.num_resets:
            return
        self.hash_blocks(seq)
        while seq.num_cached_blocks < full:
            i = seq.num_cached_blocks
            block = self._lookup(seq, i, seq.parent_block)
            if block is None:
                block = self.blocks[seq.block_table[i]]
                self._cache(block, seq.parent_block, seq.block_hashes[i], self._token_bytes(seq, i))
            seq.parent_block = block.identity
            seq.num_cached_blocks += 1

    def _cache(self, block: Block, parent: int, key: int, tokens: bytes) -> None:
        if key in self.prefix_index:  # a hash collision, or a block whose parent was evicted
            self._uncache(self.blocks[self.prefix_index[key]])
        self._last_identity += 1
        block.identity, block.parent = self._last_identity, parent
        block.hash, block.token_ids = key, tokens
        self.prefix_index[key] = block.block_id

    def _uncache(self, block: Block) -> None:
        if block.block_id in self.evictable:
            del self.evictable[block.block_id]
            self.free.append(block.block_id)
        del self.prefix_index[block.hash]
        block.identity, block.parent, block.hash, block.token_ids = 0, 0, 0, b""

    def revert(self, seqs: Iterable[Sequence]) -> None:
        """Free all blocks, in whatever state a failure has left them, and those of `seqs`."""
        self._free_all()
        self.reset_prefix_cache()
        for seq in seqs:
            self._forget_blocks(seq)

    def reset_prefix_cache(self) -> None:
        """Remove every block from the cache. Sequences keep the blocks that they own, uncached."""
        self.num_resets += 1
        for block_id in list(self.prefix_index.values()):
            self._uncache(self.blocks[block_id])

    # ---- ownership ----

    def num_needed(self, seq: Sequence, num_tokens: int) -> int:
        """New blocks that `seq` needs for its first `num_tokens`, including a copy-on-write."""
        blocks = -(-num_tokens // self.block_size)
        return blocks - len(seq.block_table) + (self._shared_block(seq) is not None)

    def share(self, seq: Sequence, matched: list[Block]) -> None:
        """Start `seq.block_table` with cached blocks. Their KV may be computed by the same step."""
        for block in matched:
            if block.ref_count == 0:
                del self.evictable[block.block_id]
            block.ref_count += 1
        seq.block_table = [block.block_id for block in matched]
        seq.num_cached_blocks = len(matched)
        seq.parent_block = matched[-1].identity if matched else 0
        seq.num_computed = len(matched) * self.block_size
        seq.began_after = self.num_resets

    def fork(self, parent: Sequence, child: Sequence, num_computed: int) -> None:
        """Share with `child` the blocks of the first `num_computed` tokens of `parent`.

        The last of these blocks is copied by whichever of the two writes to it first.
        """
        child.block_table = parent.block_table[: -(-num_computed // self.block_size)]
        for block_id in child.block_table:
            self.blocks[block_id].ref_count += 1
        child.num_computed, child.began_after = num_computed, parent.began_after
        if parent.num_cached_blocks <= (full := num_computed // self.block_size):
            child.num_cached_blocks, child.parent_block = (
                parent.num_cached_blocks,
                parent.parent_block,
            )
            child.block_hashes = parent.block_hashes[:full]
        child.needs_copy_on_write = parent.needs_copy_on_write = True

    def _shared_block(self, seq: Sequence) -> Block | None:
        """Return the block that `seq` writes next, if it must be copied before.

        A cached block counts as shared even if no other sequence owns it now, because its content
        must stay what the prefix index says.
        """
        i = seq.num_computed // self.block_size
        if not seq.needs_copy_on_write or i >= len(seq.block_table):
            return None
        block = self.blocks[seq.block_table[i]]
        return None if block.ref_count == 1 and not block.identity else block

    def copy_on_write(self, seq: Sequence) -> int | None:
        """Make the block that `seq` writes next its own. Returns the copy, if there is one."""
        shared, seq.needs_copy_on_write = self._shared_block(seq), False
        if shared is None:
            return None
        self._release_block(shared)
        copy = self._take_block()
        self._moves.append(BlockMove(shared.block_id, copy))
        seq.block_table[seq.num_computed // self.block_size] = copy
        return copy

    def num_evictable(self, matched: list[Block]) -> int:
        """How many of these blocks have no owner, and so stop being available when shared."""
        return sum(block.ref_count == 0 for block in matched)

    def append_block(self, seq: Sequence) -> int:
        """Append a block to the block table of `seq` and return it."""
        seq.block_table.append(self._take_block())
        return seq.block_table[-1]

    def choose_victim(self) -> int:
        """The evictable block that `_take_block` evicts next: the least recently used one."""
        return next(iter(self.evictable))

    def stats(self) -> dict[str, int]:
        """More counters for `LLMEngine.stats`; features/host_tier/blocks.py has some."""
        return {}

    def _take_block(self) -> int:
        """Return a block for one owner. If none is free, a cached one is evicted first."""
        if not self.free:
            self._evict(self.choose_victim())
        block_id = self.free.pop()
        self.blocks[block_id].ref_count = 1
        return block_id

    def _evict(self, block_id: int) -> None:
        """Free an evictable block. Its content is lost; features/host_tier/blocks.py saves it before."""
        self._uncache(self.blocks[block_id])
        self.evictions += 1
        self._evicted.append(block_id)

    def take_moves(self, plan: StepPlan) -> list[int]:
        """Put the moves that it must make into `plan`. Returns the blocks that were evicted for it."""
        plan.block_moves, evicted = self._moves, self._evicted
        self._moves, self._evicted = [], []
        return evicted

    def _release_block(self, block: Block) -> None:
        block.ref_count -= 1
        if block.ref_count == 0 and block.identity:
            self.evictable[block.block_id] = None
        elif block.ref_count == 0:
            self.free.append(block.block_id)

    def release(self, seq: Sequence) -> None:
        """Release the blocks of `seq`, the last first, so that shared prefixes are evicted last."""
        for block_id in reversed(seq.block_table):
            self._release_block(self.blocks[block_id])
        self._forget_blocks(seq)

    def _forget_blocks(self, seq: Sequence) -> None:
        seq.block_table = []
        seq.needs_copy_on_write = False
        seq.num_computed = seq.num_cached_blocks = seq.parent_block = 0
