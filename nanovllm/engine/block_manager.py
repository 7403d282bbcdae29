"""BlockManager: which block of the KV cache belongs to whom, and what it holds.

Owns: the pool of blocks, the prefix index, the free lists. Given: sequences. Mutates: the block
fields of the sequence it is given (`block_table`, `block_hashes`, `num_published`, `chain`).
It moves no data, and imports no torch. Every operation costs O(blocks it touches).

From token to memory (block size 4):

    token_ids    [ t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 ]           logical blocks 0, 1, 2
    block_table  [     7             2           5   ]           physical blocks
    slot of t9 = block_table[9 // 4] * 4 + 9 % 4 = 5 * 4 + 1 = 21

A block is in one of three states, which partition the pool (block 0, the null block, is in none):

    owned    ref_count > 0: it stands in that many block tables
    cached   ref_count = 0, published: its content can still be found; oldest is evicted first
    free     ref_count = 0, nothing worth keeping

A full block is published under hash = xxh64(hash of the block before it, its tokens), so that equal
hashes mean equal prefixes. A hash only suggests: a match also compares the tokens, and the identity
of the parent, a number that is never given twice. So the index is right with any hash function.
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from xxhash import xxh64_intdigest

from nanovllm.engine.sequence import Sequence


@dataclass(slots=True)
class Block:
    index: int
    ref_count: int = 0
    # Set while published.
    identity: int = 0  # unique for ever; 0 is "not published", and the parent of a first block
    parent: int = 0  # identity of the block before it
    hash: int = 0
    token_ids: bytes = b""


class BlockManager:
    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        """`num_blocks` usable blocks, numbered from 1; the null block 0 comes on top."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks + 1)]
        self.free = list(range(num_blocks, 0, -1))  # taken from the end
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self.index: dict[int, int] = {}  # hash -> block
        self.evictions = 0
        self._identities = 0

    @property
    def num_available(self) -> int:
        """Blocks that no sequence owns: free, or cached and evictable."""
        return len(self.free) + len(self.cached)

    # ---- the prefix index ----

    def hash_blocks(self, seq: Sequence) -> None:
        """Bring `seq.block_hashes` up to date: one hash for each block of known tokens."""
        done, size = len(seq.block_hashes), self.block_size
        full = len(seq.token_ids) // size
        if done == full:
            return
        parent = seq.block_hashes[-1] if done else 0
        data = array("I", seq.token_ids[done * size : full * size]).tobytes()
        for at in range(0, len(data), size * 4):
            parent = self._hash(parent, data[at : at + size * 4])
            seq.block_hashes.append(parent)

    @staticmethod
    def _hash(parent: int, tokens: bytes) -> int:
        return xxh64_intdigest(parent.to_bytes(8, "little") + tokens)

    def match(self, seq: Sequence) -> list[int]:
        """The published blocks that hold the beginning of `seq`; changes nothing but its hashes.

        Stops one token before the end: one token is always computed, for its logits.
        """
        matched: list[int] = []
        if not self.enable_prefix_caching or not self.index:
            return matched
        self.hash_blocks(seq)
        parent = 0
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            block = self._find(seq, i, parent)
            if block is None:
                break
            matched.append(block.index)
            parent = block.identity
        return matched

    def _find(self, seq: Sequence, i: int, parent: int) -> Block | None:
        """The published block with the content of logical block `i` of `seq`, if there is one."""
        found = self.index.get(seq.block_hashes[i])
        if found is None:
            return None
        block = self.blocks[found]
        same = block.parent == parent and block.token_ids == self._tokens(seq, i)
        return block if same else None

    def _tokens(self, seq: Sequence, i: int) -> bytes:
        return array("I", seq.token_ids[i * self.block_size : (i + 1) * self.block_size]).tobytes()

    def publish(self, seq: Sequence) -> None:
        """Let others find every block of `seq` whose tokens are known and whose KV is computed.

        "Computed" counts the plan being made: a layer stores all K and V before any row attends.
        """
        full = min(seq.num_computed, len(seq.token_ids)) // self.block_size
        if not self.enable_prefix_caching or seq.num_published >= full:
            return
        self.hash_blocks(seq)
        while seq.num_published < full:
            i = seq.num_published
            key, twin = seq.block_hashes[i], self._find(seq, i, seq.chain)
            block = twin or self.blocks[seq.block_table[i]]
            if twin is None:
                if key in self.index:  # a collision, or an orphan whose parent is forgotten
                    self._unpublish(self.blocks[self.index[key]])
                self._identities += 1
                block.identity, block.parent, block.hash = self._identities, seq.chain, key
                block.token_ids = self._tokens(seq, i)
                self.index[key] = block.index
            seq.chain = block.identity
            seq.num_published += 1

    def _unpublish(self, block: Block) -> None:
        if block.index in self.cached:
            del self.cached[block.index]
            self.free.append(block.index)
        del self.index[block.hash]
        block.identity, block.parent, block.hash, block.token_ids = 0, 0, 0, b""

    def reset_prefix_cache(self) -> None:
        """Forget every published block. Sequences keep the blocks they own."""
        for index in list(self.index.values()):
            self._unpublish(self.blocks[index])

    # ---- ownership ----

    def num_needed(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that `seq` lacks to hold its first `num_tokens` tokens, a copy for a tail included."""
        return -(-num_tokens // self.block_size) - len(seq.block_table) + seq.shares_tail

    def adopt(self, seq: Sequence, matched: list[int]) -> None:
        """Start the block table of `seq` with published blocks."""
        for index in matched:
            block = self.blocks[index]
            if block.ref_count == 0:
                del self.cached[index]
            block.ref_count += 1
        seq.block_table = matched
        seq.num_published = len(matched)
        seq.chain = self.blocks[matched[-1]].identity if matched else 0
        seq.num_computed = len(matched) * self.block_size  # their KV is valid already

    def fork(self, parent: Sequence, child: Sequence, num_computed: int) -> None:
        """Start the block table of `child` with the blocks that hold its first `num_computed` tokens
        and the one after them, shared with `parent`: whoever writes into it first copies it.
        """
        child.block_table = parent.block_table[: num_computed // self.block_size + 1]
        for index in child.block_table:
            self.blocks[index].ref_count += 1
        child.num_computed = num_computed
        child.shares_tail = parent.shares_tail = True

    def own_tail(self, seq: Sequence) -> tuple[int, int] | None:
        """Make the block that `seq` writes next its own; the copy to make, if it takes one.

        A published block is as good as shared, even if nobody else owns it just now: what others
        may find in it must stay. It fills its block in place only if that is neither.
        """
        seq.shares_tail = False
        i = seq.num_computed // self.block_size
        if i >= len(seq.block_table):
            return None  # the next write starts a block
        old = self.blocks[seq.block_table[i]]
        if old.ref_count == 1 and not old.identity:
            return None
        self._drop(old)
        seq.block_table[i] = self._take()
        return old.index, seq.block_table[i]

    def num_idle(self, matched: list[int]) -> int:
        """How many of these blocks no sequence owns: adopting them makes them unavailable."""
        return sum(self.blocks[index].ref_count == 0 for index in matched)

    def append(self, seq: Sequence) -> int:
        """Give `seq` one more block."""
        seq.block_table.append(self._take())
        return seq.block_table[-1]

    def _take(self) -> int:
        """A block for one owner: a free one, or else the cached one that was unused longest."""
        if self.free:
            index = self.free.pop()
        else:
            index, _ = self.cached.popitem(last=False)
            self._unpublish(self.blocks[index])
            self.evictions += 1
        self.blocks[index].ref_count = 1
        return index

    def _drop(self, block: Block) -> None:
        """One owner less. With none left the block is free, or cached if it can be found."""
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.identity:
                self.cached[block.index] = None
            else:
                self.free.append(block.index)

    def release(self, seq: Sequence) -> None:
        """Take back all blocks of `seq`, last block first, so that shared heads age last."""
        for index in reversed(seq.block_table):
            self._drop(self.blocks[index])
        seq.block_table = []
        seq.shares_tail = False
        seq.num_computed = seq.num_published = seq.chain = 0
