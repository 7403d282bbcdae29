"""A state machine that drives a block manager."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from oracle_engine import plain_sequence

from lessons.oracle.oracle import ALPHABET
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import StepPlan

MACHINE = settings(max_examples=400, stateful_step_count=40, deadline=None)


class BlockManagerMachine(RuleBasedStateMachine):
    """The block manager alone: sequences that grow, fork and are released in any order."""

    manager = BlockManager

    @initialize(size=st.integers(1, 4), number=st.integers(1, 12))
    def start(self, size: int, number: int) -> None:
        self.block_manager = self.manager(number, size)
        self.live: list[Sequence] = []
        self.content: dict[int, list[int | None]] = {i: [None] * size for i in range(number + 1)}
        self.host_content: dict[int, list[int | None]] = {}

    @rule(tokens=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=12))
    def open(self, tokens: list[int]) -> None:
        seq = plain_sequence(tokens)
        matched = self.block_manager.match(seq)
        lacking = self.block_manager.num_needed(seq, len(tokens)) - len(matched)
        unowned = sum(block.ref_count == 0 for block in matched)
        if lacking + unowned > self.block_manager.num_available:
            return
        self.block_manager.attach_cached(seq, matched)
        assert seq.num_computed < len(tokens)
        shared = list(seq.block_table)
        for _ in range(lacking):
            self.block_manager.append_block(seq)
        self.make_moves()
        held = [t for index in shared for t in self.content[index]]
        assert held == tokens[: seq.num_computed], "a match holds other tokens"
        self.write(seq, len(tokens))
        self.live.append(seq)

    def make_moves(self) -> None:
        self.block_manager.fill_copies(plan := StepPlan())
        for source, target in plan.saves:
            self.host_content[target] = list(self.content[source])
        for source, target in plan.block_copies:
            self.content[target] = list(self.content[source])
        for source, target in plan.loads:
            self.content[target] = list(self.host_content[source])

    def write(self, seq: Sequence, upto: int) -> None:
        size = self.block_manager.block_size
        for position in range(seq.num_computed, upto):
            block = seq.block_table[position // size]
            assert self.block_manager.blocks[block].ref_count == 1
            assert not self.block_manager.blocks[block].is_cached, "a cached block is written"
            self.content[block][position % size] = seq.token_ids[position]
        seq.num_computed = upto
        self.block_manager.cache_full_blocks(seq)

    @rule(pick=st.integers(0, 99), token=st.integers(0, ALPHABET - 1))
    def grow(self, pick: int, token: int) -> None:
        if not self.live:
            return
        seq = self.live[pick % len(self.live)]
        if (
            self.block_manager.num_needed(seq, seq.num_computed + 1)
            > self.block_manager.num_available
        ):
            return
        if seq.needs_copy_on_write:
            self.block_manager.copy_on_write(seq)
        for _ in range(self.block_manager.num_needed(seq, seq.num_computed + 1)):
            self.block_manager.append_block(seq)
        self.make_moves()
        seq.token_ids.append(token)
        self.write(seq, seq.num_computed + 1)

    @rule(pick=st.integers(0, 99), at=st.integers(0, 99))
    def fork(self, pick: int, at: int) -> None:
        """At any point of what the parent has computed, as a beam search would."""
        parent = self.live[pick % len(self.live)] if self.live else None
        if parent is None or parent.num_computed == 0:
            return
        keep = at % parent.num_computed
        child = plain_sequence(parent.token_ids[:keep])
        self.block_manager.fork(parent, child, keep)
        self.live.append(child)

    @rule(pick=st.integers(0, 99))
    def close(self, pick: int) -> None:
        if self.live:
            self.block_manager.release(self.live.pop(pick % len(self.live)))

    @rule()
    def reset(self) -> None:
        if self.block_manager.reset_prefix_cache():
            assert not any(seq.block_table for seq in self.live)
            for content in (self.content, self.host_content):
                content.update((block, [None] * len(held)) for block, held in content.items())

    @invariant()
    def all_holds(self) -> None:
        if not hasattr(self, "block_manager"):
            return
        blocks, size = self.block_manager, self.block_manager.block_size
        owners = [0] * len(blocks.blocks)
        for seq in self.live:
            for index in seq.block_table:
                owners[index] += 1
            held = [t for i in seq.block_table for t in self.content[i]]
            assert held[: seq.num_computed] == seq.token_ids[: seq.num_computed]
        assert [b.ref_count for b in blocks.blocks] == owners
        owned = [i for i, n in enumerate(owners) if n]
        assert sorted([*blocks.free, *blocks.evictable, *owned]) == list(
            range(1, blocks.num_blocks + 1)
        )
        assert {b.block_hash: b for b in blocks.blocks if b.is_cached} == blocks.hash_to_block
        for block in blocks.hash_to_block.values():
            assert self.content[block.block_id] == block.token_ids
            assert len(block.token_ids) == size
