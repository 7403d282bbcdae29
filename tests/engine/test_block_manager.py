"""Prefix sharing and eviction, and a state machine that drives the block manager alone."""

import pytest
from machines import MACHINE, BlockManagerMachine
from oracle_engine import Engine, right, sequence

TestBlockManager = pytest.mark.slow(BlockManagerMachine.TestCase)
TestBlockManager.settings = MACHINE


def test_equal_blocks_under_different_prefixes() -> None:
    engine = Engine(blocks=40, size=2, seqs=1, budget=100)
    seqs = [sequence([head, head, 5, 6, 7, 8], 2, head) for head in range(4)]
    engine.add(*seqs)
    engine.run()
    assert [s.num_cached_tokens for s in seqs] == [0, 0, 0, 0]
    assert all(right(s) for s in seqs)


def test_stale_key_after_reuse() -> None:
    """A block that was evicted and filled anew is not found under its old content."""
    engine = Engine(blocks=4, size=2, seqs=1, budget=100)
    old, new, again = ([t] * 6 for t in (1, 2, 1))
    seqs = [sequence(p, 2, i) for i, p in enumerate((old, new, again))]
    engine.add(*seqs)
    engine.run()
    assert engine.block_manager.evictions > 0
    assert seqs[2].num_cached_tokens == 0
    assert all(right(s) for s in seqs)


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    engine = Engine(blocks=8, size=1, seqs=1, budget=100)
    engine.add(sequence([1, 2, 3], 1, 0), sequence([4, 5, 6], 1, 1))
    engine.run()
    engine.add(sequence([7, 8, 9, 7], 1, 2))  # two free blocks, then two evicted: 3 and 2
    engine.run()
    probe = [sequence(p, 1, 9) for p in ([1, 2, 3, 0], [4, 5, 6, 0])]
    assert [len(engine.block_manager.match(p)) for p in probe] == [1, 3]
