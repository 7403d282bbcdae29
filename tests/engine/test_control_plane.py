"""Scheduler and BlockManager: random histories on the oracle, state machines, mutants.

A failing history prints its seed: `run_history(seed)` repeats it.
"""

from types import ModuleType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from nanovllm.engine import block_manager, scheduler
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import StepPlan
from nanovllm.tools.oracle.mutants import MUTANTS, apply
from nanovllm.tools.oracle.oracle import (
    ALPHABET,
    History,
    OracleRunner,
    answer,
    plain_sequence,
    run_history,
)

# Of 500 histories, 5 show the rarest fault of mutants.py, and 15 the next: of 2,000, 20 and 60.
HISTORIES, SLOW = 2000, pytest.mark.slow
MACHINE = settings(max_examples=400, stateful_step_count=40, deadline=None)


PARTS = [range(200), range(200, HISTORIES)]


@pytest.mark.parametrize("seeds", [PARTS[0], *(pytest.param(p, marks=SLOW) for p in PARTS[1:])])
def test_random_histories(seeds: range) -> None:
    preemptions = evictions = 0
    for seed in seeds:
        history = run_history(seed)
        preemptions += history.scheduler.preemptions
        evictions += history.blocks.evictions
    assert preemptions > len(seeds)  # else the pools were too large to prove anything
    assert evictions > len(seeds)


@pytest.mark.slow
def test_rows_build_what_the_plan_says() -> None:
    """The runner's own batches beside the oracle's reading of the same plans, over 200 histories."""
    import numpy as np
    import torch

    from nanovllm.runner.rows import Rows

    class Both(OracleRunner):
        def run(self, plan: StepPlan) -> list[int]:
            self.rows.apply(plan)
            step = self.rows.build(plan)
            batch, sampling = step.forward_batch, step.sampling_batch
            positions = list(self.positions)
            drawn = super().run(plan)
            work = [(c.row, c.start, c.token_ids, c.yields is not None) for c in plan.chunks]
            for row in plan.decode_rows:
                work.append((row, positions[row], [self.before[row]], True))
            ids = [t for _, _, tokens, _ in work for t in tokens]
            assert batch.input_ids.tolist() == ids
            at = [(row, start + i) for row, start, tokens, _ in work for i in range(len(tokens))]
            assert batch.positions.tolist() == [p for _, p in at]
            assert batch.slot_mapping.tolist() == [self.slot(row, p) for row, p in at]
            ends = np.cumsum([len(tokens) for _, _, tokens, _ in work])
            assert batch.query_start_loc.tolist() == [0, *ends]
            assert batch.context_lens.tolist() == [start + len(t) for _, start, t, _ in work]
            draws = [
                (e - 1, r, s + len(t)) for e, (r, s, t, d) in zip(ends, work, strict=True) if d
            ]
            assert batch.logits_indices.tolist() == [e for e, _, _ in draws]
            assert sampling.seeds.tolist() == [self.seeds[row] for _, row, _ in draws]
            assert sampling.positions.tolist() == [p for _, _, p in draws]
            self.rows.record(step.sampling_rows, torch.tensor(drawn, dtype=torch.int64))
            self.before = list(self.last)
            return drawn

    for seed in range(200):
        history = History(seed)
        runner = Both(history.num_blocks, history.size, history.max_num_seqs)
        runner.before = [0] * history.max_num_seqs
        runner.rows = Rows(history.max_num_seqs, 40, history.size, ALPHABET, torch.device("cpu"))
        history.runner = runner
        for _ in range(40):
            history.rng.choice((History.step, History.step, History.add, History.abort))(history)
        history.drain()


# ---- what no history reaches: faults that only a scripted test shows ----


def check_cached_tail(managers: ModuleType = block_manager) -> None:
    """A fork whose parent is gone owns its last block alone, but others can still find the parent's
    tokens there. No history does this: a fork writes while its parent runs. A beam search would.
    """
    blocks = managers.BlockManager(4, 4)
    parent = plain_sequence([1, 2, 3, 4])
    blocks.append_block(parent)
    parent.num_computed = 4
    blocks.cache_full_blocks(parent)
    child = plain_sequence([1, 2])
    blocks.fork(parent, child, 2)
    blocks.release(parent)
    shared = child.block_table[0]
    blocks.copy_on_write(child)
    blocks.take_moves(plan := StepPlan())
    copied = plan.block_moves == [(shared, child.block_table[0])]
    found = blocks.match(plain_sequence([1, 2, 3, 4, 5])) == [blocks.blocks[shared]]
    assert copied, "it is written in place"
    assert shared in blocks.evictable
    assert found


def check_late_copy(schedulers: ModuleType = scheduler) -> None:
    """A running sequence copies a block that another shares, and the runner is told which it writes.
    No history does this either: the samples of a request copy as soon as they are admitted.
    """
    blocks, runner = block_manager.BlockManager(9, 4), OracleRunner(9, 4, 2)
    planner = schedulers.Scheduler(blocks, 2, 99)
    seq, other = plain_sequence([1, 2, 0, 1, 2, 0]), plain_sequence([1, 2, 0, 1, 2])
    seq.max_length = 9
    planner.add(seq)
    for _ in range(3):
        step = planner.schedule()
        planner.commit(step, runner.run(step.plan))
        if not other.block_table:
            blocks.fork(seq, other, 5)
            shared = other.block_table[1]
    told = runner.tables[0][1] != shared
    assert told, "the runner writes into the shared block"
    assert seq.output_ids == answer([1, 2, 0, 1, 2, 0], 9, frozenset(), 0)


# ---- mutants: one-line faults, each of which the histories must catch ----


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    module, mutant = MUTANTS[name].module, apply(MUTANTS[name])
    chosen = {"managers" if module is block_manager else "schedulers": mutant}
    for seed in range(200):  # a part of what the suite runs
        try:
            run_history(seed, **chosen)
        except AssertionError:
            return
    check = check_cached_tail if module is block_manager else check_late_copy
    with pytest.raises(AssertionError):
        check(mutant)


def test_what_no_history_reaches() -> None:
    check_cached_tail()
    check_late_copy()


# ---- hypothesis drives the same histories, and shrinks what it finds ----


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32), bits=st.sampled_from([3, 64]))
    def start(self, seed: int, bits: int) -> None:
        self.history = History(seed, hash_bits=bits)

    @rule()
    def add(self) -> None:
        self.history.add()

    @rule()
    def step(self) -> None:
        self.history.step()

    @rule()
    def abort(self) -> None:
        self.history.abort()

    @rule()
    def abandon(self) -> None:
        self.history.abandon()

    @invariant()
    def all_holds(self) -> None:
        if hasattr(self, "history"):
            self.history.check()

    def teardown(self) -> None:
        if hasattr(self, "history"):
            self.history.drain()


class BlockManagerMachine(RuleBasedStateMachine):
    """The block manager alone: sequences that grow, fork and are released in any order."""

    manager = BlockManager

    @initialize(size=st.integers(1, 4), number=st.integers(1, 12), bits=st.sampled_from([3, 64]))
    def start(self, size: int, number: int, bits: int) -> None:
        self.blocks = self.manager(number, size)
        full = self.blocks._hash
        self.blocks._hash = lambda parent, tokens: full(parent, tokens) & ((1 << bits) - 1)
        self.live: list[Sequence] = []
        self.content: dict[int, list[int | None]] = {i: [None] * size for i in range(number + 1)}
        self.host_content: dict[int, list[int | None]] = {}

    @rule(tokens=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=12))
    def open(self, tokens: list[int]) -> None:
        seq = plain_sequence(tokens)
        matched = self.blocks.match(seq)
        lacking = self.blocks.num_needed(seq, len(tokens)) - len(matched)
        if lacking + self.blocks.num_evictable(matched) > self.blocks.num_available:
            return
        self.blocks.share(seq, matched)
        assert seq.num_computed < len(tokens)
        shared = list(seq.block_table)
        for _ in range(lacking):
            self.blocks.append_block(seq)
        self.make_moves()
        held = [t for index in shared for t in self.content[index]]
        assert held == tokens[: seq.num_computed], "a match holds other tokens"
        self.write(seq, len(tokens))
        self.live.append(seq)

    def make_moves(self) -> None:
        self.blocks.take_moves(plan := StepPlan())
        for source, target in plan.saves:
            self.host_content[target] = list(self.content[source])
        for source, target in plan.block_moves:
            self.content[target] = list(self.content[source])
        for source, target in plan.loads:
            self.content[target] = list(self.host_content[source])

    def write(self, seq: Sequence, upto: int) -> None:
        size = self.blocks.block_size
        for position in range(seq.num_computed, upto):
            block = seq.block_table[position // size]
            assert self.blocks.blocks[block].ref_count == 1
            assert not self.blocks.blocks[block].identity, "a cached block is written"
            self.content[block][position % size] = seq.token_ids[position]
        seq.num_computed = upto
        self.blocks.cache_full_blocks(seq)

    @rule(pick=st.integers(0, 99), token=st.integers(0, ALPHABET - 1))
    def grow(self, pick: int, token: int) -> None:
        if not self.live:
            return
        seq = self.live[pick % len(self.live)]
        if self.blocks.num_needed(seq, seq.num_computed + 1) > self.blocks.num_available:
            return
        if seq.needs_copy_on_write:
            self.blocks.copy_on_write(seq)
        for _ in range(self.blocks.num_needed(seq, seq.num_computed + 1)):
            self.blocks.append_block(seq)
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
        self.blocks.fork(parent, child, keep)
        self.live.append(child)

    @rule(pick=st.integers(0, 99))
    def close(self, pick: int) -> None:
        if self.live:
            self.blocks.release(self.live.pop(pick % len(self.live)))

    @rule()
    def reset(self) -> None:
        self.blocks.reset_prefix_cache()

    @invariant()
    def all_holds(self) -> None:
        if not hasattr(self, "blocks"):
            return
        blocks, size = self.blocks, self.blocks.block_size
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
        assert {b.hash: b.block_id for b in blocks.blocks if b.identity} == blocks.prefix_index
        for index in blocks.prefix_index.values():
            named = memoryview(blocks.blocks[index].token_ids).cast("I").tolist()
            assert self.content[index] == named
            assert len(named) == size


TestScheduler = pytest.mark.slow(SchedulerMachine.TestCase)
TestScheduler.settings = settings(MACHINE, max_examples=200)  # besides the histories above
TestBlockManager = pytest.mark.slow(BlockManagerMachine.TestCase)
TestBlockManager.settings = MACHINE
