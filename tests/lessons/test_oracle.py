"""Scheduler and block manager: random histories on the oracle, and the mutants that they catch.

A failing history prints its seed: `run_history(seed)` repeats it.
"""

from types import ModuleType

import pytest
from oracle_engine import plain_sequence

from lessons.oracle.mutants import MUTANTS, apply
from lessons.oracle.oracle import OracleRunner, answer, run_history
from nanovllm.engine import block_manager, scheduler
from nanovllm.plan import StepPlan

# Of 500 histories, 5 show the rarest fault of mutants.py, and 15 the next: of 1,000, 10 and 30.
HISTORIES, SLOW = 1000, pytest.mark.slow


PARTS = [range(100), range(100, HISTORIES)]


@pytest.mark.parametrize("seeds", [PARTS[0], *(pytest.param(p, marks=SLOW) for p in PARTS[1:])])
def test_random_histories(seeds: range) -> None:
    preemptions = evictions = 0
    for seed in seeds:
        history = run_history(seed)
        preemptions += history.scheduler.preemptions
        evictions += history.block_manager.evictions
    assert preemptions > len(seeds)  # else the pools were too large to prove anything
    assert evictions > len(seeds)


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
    blocks.fill_copies(plan := StepPlan())
    copied = plan.block_copies == [(shared, child.block_table[0])]
    found = blocks.match(plain_sequence([1, 2, 3, 4, 5])) == [blocks.blocks[shared]]
    assert copied, "it is written in place"
    assert shared in blocks.evictable
    assert found


def check_late_copy(schedulers: ModuleType = scheduler) -> None:
    """A running sequence copies a block that another shares, and the runner is told which it
    writes. No history does this either: the samples of a request copy as soon as they are admitted.
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


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[SLOW] * (i % 8 > 0)) for i, name in enumerate(MUTANTS)],
)
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
