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
from machines import MACHINE, BlockManagerMachine

from nanovllm.engine import block_manager, scheduler
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


TestScheduler = pytest.mark.slow(SchedulerMachine.TestCase)
TestScheduler.settings = settings(MACHINE, max_examples=200)  # besides the histories above
TestBlockManager = pytest.mark.slow(BlockManagerMachine.TestCase)
TestBlockManager.settings = MACHINE
