"""StateBlockManager: a BlockManager for models whose sequences have a state.

The keys and values of a prefix can be cut at any token. A state cannot: it is the result of all
tokens before it, and the row overwrites it with the next token. The prefix cache therefore keeps
snapshots: copies of a state after the last token of a cached block. A match ends at the last block
that has a snapshot, and the row begins with a copy of it.

    blocks     [ a b ]  [ c d ]  [ e f ]  [ g h ]
    snapshots              2                 5

    The match of a b c d e f x ends after d, although there is KV for e and f. They are computed
    again, and the state after f becomes a snapshot, because others may begin in the same way.

A snapshot takes a slot, the number of a state on the device. A slot takes as much memory as the
KV of some hundred blocks, so only these snapshots are made:

    kept       After the last full block of a prompt. If the prompt ends there, also a block before.
    kept       After the last block of a match whose KV was cached and whose snapshot was not. The
               second request with a common prefix makes it, and the third uses it.
    latest     After the last full block of any other chunk, and while decoding. The next snapshot
               of the sequence replaces it. If the sequence ends or is preempted, it is kept.
    fork       Before the last token of a prompt with several samples, for one step.

A preempted sequence repeats at most one block. If no slot is free, the least recently used
snapshot is evicted, except the latest ones of sequences. Without any slot, there is no snapshot.

The runner copies states to rows before it computes anything, and a step then writes its snapshots.
The same plan may therefore read a slot and write it. A sequence whose match ends at a
snapshot of the plan that is being made has to wait for the next plan.
"""

from __future__ import annotations

from collections import OrderedDict

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import StateSave, StepPlan


class StateBlockManager(BlockManager):
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        num_rows: int,
        num_states: int,
    ) -> None:
        """State `num_rows` is the padding row's, and the later ones are slots."""
        self.all_slots = range(num_rows + 1, num_states)
        self.state_hits = self.state_saves = self.state_evictions = 0
        super().__init__(num_blocks, block_size, enable_prefix_caching)

    def _free_all(self) -> None:
        super()._free_all()
        self.free_slots = list(reversed(self.all_slots))  # taken from the end
        # Block -> its slot, the least recently used first.
        self.snapshots: OrderedDict[int, int] = OrderedDict()
        # Sequence -> the block of the snapshot that its next one replaces.
        self.latest_snapshot: dict[Sequence, int] = {}
        # Sequence -> (number of tokens, slot) of a snapshot whose block is not cached yet, because
        # its last token is in flight.
        self.uncached_snapshots: dict[Sequence, tuple[int, int]] = {}
        # Parent -> the slot that its forks begin with.
        self.fork_slots: dict[Sequence, int] = {}
        # Sequence -> the number of tokens after which its match lacked a snapshot.
        self.resumable_at: dict[Sequence, int] = {}
        self._begin_plan()

    def _begin_plan(self) -> None:
        self._sources: dict[Sequence, int] = {}  # the state with which a sequence begins
        self._saves: list[StateSave] = []
        self._fresh: set[int] = set()  # slots that the plan writes
        self._returned: list[int] = []  # slots that the next plan may write

    def stats(self) -> dict[str, int]:
        """Return counters for `LLMEngine.stats`; docs/api.md explains them."""
        return {
            "state_snapshots": len(self.snapshots),
            "state_hits": self.state_hits,
            "state_saves": self.state_saves,
            "state_evictions": self.state_evictions,
        }

    # ---- matches ----

    def match(self, seq: Sequence) -> list[Block]:
        matched = super().match(seq)
        while matched and matched[-1].block_id not in self.snapshots:
            matched.pop()
        return matched

    def is_ready(self, matched: list[Block]) -> bool:
        return not matched or self.snapshots[matched[-1].block_id] not in self._fresh

    def attach_cached(self, seq: Sequence, matched: list[Block]) -> None:
        with_kv = super().match(seq)
        super().attach_cached(seq, matched)
        if len(with_kv) > len(matched):
            self.resumable_at[seq] = len(with_kv) * self.block_size
        if matched:
            self.state_hits += 1
            last = matched[-1].block_id
            self._sources[seq] = self.snapshots[last]
            self.snapshots.move_to_end(last)
            self._keep(last)

    def _keep(self, block_id: int) -> None:
        """Keep the snapshot of a block when the sequence that made it continues."""
        for seq in [seq for seq, latest in self.latest_snapshot.items() if latest == block_id]:
            del self.latest_snapshot[seq]

    # ---- forks ----

    def can_fork(self, parent: Sequence, num_computed: int) -> bool:
        has_state = parent in self.fork_slots or num_computed in (0, parent.num_computed)
        return has_state and parent not in self._sources

    def fork(self, parent: Sequence, child: Sequence, num_computed: int) -> None:
        super().fork(parent, child, num_computed)
        if num_computed == parent.num_computed:
            self._sources[child] = parent.row
        elif num_computed:
            self._sources[child] = self.fork_slots[parent]

    # ---- snapshots ----

    def cache_blocks(self, seq: Sequence, start: int) -> None:
        super().cache_blocks(seq, start)
        end = seq.num_computed
        fork_at = seq.num_prompt - 1
        if seq.forks and start <= fork_at < end and fork_at and seq not in self.fork_slots:
            slot = self._save(seq, fork_at)
            if slot is not None:
                self.fork_slots[seq] = slot
        if not self.enable_prefix_caching:
            return
        if seq in self.resumable_at and start < self.resumable_at[seq] <= end:
            self._snapshot_of_cached(seq, self.resumable_at.pop(seq))
        boundary = end // self.block_size * self.block_size
        if boundary <= start:
            return
        self._snapshot_at_boundary(seq, boundary)
        before = boundary - self.block_size
        if boundary == seq.num_prompt == end and before > start:
            # The same prompt again computes its last token, and cannot use the last snapshot.
            self._snapshot_of_cached(seq, before)

    def _snapshot_of_cached(self, seq: Sequence, position: int) -> None:
        """Save the state after `position` tokens, if the block that ends there is cached."""
        block = self.find(self.block_hash(seq, position // self.block_size - 1))
        if block is not None:
            self._snapshot(seq, position, block)

    def _snapshot_at_boundary(self, seq: Sequence, boundary: int) -> None:
        """Make a snapshot after the last full block that the plan computes."""
        if seq.num_cached_blocks * self.block_size < boundary:
            if (slot := self._save(seq, boundary)) is not None:
                self._return_uncached(seq)
                self.uncached_snapshots[seq] = boundary, slot
            return
        block = self.hash_to_block[seq.block_hashes[seq.num_cached_blocks - 1]]
        is_latest = boundary != seq.num_prompt // self.block_size * self.block_size
        if block.block_id not in self.snapshots:
            self._drop_latest(seq)
        if self._snapshot(seq, boundary, block) and is_latest:
            self.latest_snapshot[seq] = block.block_id

    def _snapshot(self, seq: Sequence, position: int, block: Block) -> bool:
        """Save the state after `position` tokens as the snapshot of a block. Returns success."""
        if block.block_id in self.snapshots:
            self.snapshots.move_to_end(block.block_id)
            return False
        slot = self._save(seq, position)
        if slot is None:
            return False
        self._attach(block, slot)
        return True

    def _attach(self, block: Block, slot: int) -> None:
        self.snapshots[block.block_id] = slot
        self.state_saves += 1

    def cache_full_blocks(self, seq: Sequence) -> None:
        super().cache_full_blocks(seq)
        boundary, slot = self.uncached_snapshots.get(seq, (0, 0))
        if slot and seq.num_cached_blocks * self.block_size == boundary:
            del self.uncached_snapshots[seq]
            block = self.hash_to_block[seq.block_hashes[seq.num_cached_blocks - 1]]
            self._drop_latest(seq)
            if block.block_id in self.snapshots:
                self._return_slot(slot)
            else:
                self._attach(block, slot)
                self.latest_snapshot[seq] = block.block_id

    def _drop_latest(self, seq: Sequence) -> None:
        """Drop the latest snapshot of `seq`, if it has one that the next one replaces."""
        if seq in self.latest_snapshot:
            self._drop(self.latest_snapshot[seq])

    def _save(self, seq: Sequence, position: int) -> int | None:
        """Plan to save the state after `position` tokens. Returns the slot, or None."""
        slot = self._take_slot()
        if slot is not None:
            self._fresh.add(slot)
            self._saves.append(StateSave(seq.row, seq.num_computed - position, slot))
        return slot

    def _take_slot(self) -> int | None:
        """Return a slot that the plan may write, or None. May evict a snapshot for it."""
        if not self.free_slots:
            latest = set(self.latest_snapshot.values())
            for block_id, slot in self.snapshots.items():
                if slot not in self._fresh and block_id not in latest:
                    self._drop(block_id)
                    self.state_evictions += 1
                    break
        return self.free_slots.pop() if self.free_slots else None

    def _drop(self, block_id: int) -> None:
        """Drop the snapshot of a block."""
        self._keep(block_id)
        self._return_slot(self.snapshots.pop(block_id))

    def _return_slot(self, slot: int) -> None:
        """Free a slot. If the plan that is being made writes it, the next plan may use it."""
        (self._returned if slot in self._fresh else self.free_slots).append(slot)

    def _return_uncached(self, seq: Sequence) -> None:
        if seq in self.uncached_snapshots:
            self._return_slot(self.uncached_snapshots.pop(seq)[1])

    # ---- blocks ----

    def _evict(self, block: Block) -> None:
        if block.block_id in self.snapshots:
            self._drop(block.block_id)
        super()._evict(block)

    def _forget_blocks(self, seq: Sequence) -> None:
        super()._forget_blocks(seq)
        for per_sequence in (self._sources, self.resumable_at, self.latest_snapshot):
            per_sequence.pop(seq, None)
        self._return_uncached(seq)
        if seq in self.fork_slots:
            self._return_slot(self.fork_slots.pop(seq))

    def fill_copies(self, plan: StepPlan) -> list[int]:
        plan.state_copies = [(source, seq.row) for seq, source in self._sources.items()]
        plan.state_saves = self._saves
        for parent in [parent for parent in self.fork_slots if not parent.forks]:
            self._return_slot(self.fork_slots.pop(parent))
        self.free_slots += self._returned
        self._begin_plan()
        return super().fill_copies(plan)
