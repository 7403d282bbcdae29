"""Checks `slots` and `blocks_to_append`: python -m lessons build slots --check FILE"""

from types import SimpleNamespace

import pytest
from build_check import OracleRunner, case, check_history, expect, load, same

from lessons.oracle import oracle
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

slots, blocks_to_append = load("slots.py", "slots", "blocks_to_append")


def equal(got: object, want: object, what: str) -> None:
    """Fail unless these are equal and of the same types: 1.0 and an array are not a slot."""
    expect(repr(got) == repr(want), f"{what} should be {want!r}, but with your code it is {got!r}.")


@pytest.mark.parametrize(
    ("table", "size", "start", "count", "want", "more"),
    [
        ([7, 2], 4, 2, 4, [30, 31, 8, 9], 0),
        ([7, 2], 4, 0, 8, [28, 29, 30, 31, 8, 9, 10, 11], 0),
        ([3, 1, 2], 1, 1, 2, [1, 2], 0),
        ([5], 16, 15, 1, [95], 0),
        ([5], 16, 3, 0, [], 0),
        ([7, 2], 4, 6, 3, None, 1),
        ([], 4, 0, 9, None, 3),
        ([], 4, 0, 8, None, 2),
        ([7, 2, 1], 4, 0, 4, [28, 29, 30, 31], 0),
        ([], 4, 0, 0, [], 0),
        ([7, 2], 4, 8, 0, [], 0),
        ([7, 2], 4, 12, 1, None, 2),
        ([7, 2], 4, 12, 0, [], 1),
        ([], 4, 4, 4, None, 2),
    ],
)
def test_arithmetic(
    table: list[int], size: int, start: int, count: int, want: list[int] | None, more: int
) -> None:
    given = list(table)
    what = f"Blocks of {size} slots, block table {given}, {count} positions from {start} on"
    with case(what):
        number = blocks_to_append(table, size, start, count)
        equal(number, more, f"{what}: the number of blocks to append")
        if want is not None:
            got = slots(table, size, start, count)
            equal(got, want, f"{what}: the list of slots")
            slots([1], 4, 0, 3)
            equal(got, want, f"{what}: the list of slots, after another call,")
            got.append(99)  # the caller's own list now
            equal(slots(table, size, start, count), want, f"{what}: the list of a second call")
    same(table, given, f"{what}: the block table after the calls")


def test_a_table_that_changes() -> None:
    table = [1]
    for block in (2, 5):
        table.insert(0, block)
        what = f"Blocks of 4 slots, and a block table that has become {table}: the "
        equal(slots(table, 4, 0, 2), [4 * block, 4 * block + 1], f"{what}slots of positions 0, 1")
        number = blocks_to_append(table, 4, 0, 16)
        equal(number, 4 - len(table), f"{what}number of blocks to append for 16 positions")


class Runner(OracleRunner):
    """The test suite's runner, which writes and reads where `slots` says."""

    def slot(self, row: int, position: int) -> int:
        table = [self.tables[row].get(i, 0) for i in range(max(self.tables[row]) + 1)]
        (slot,) = slots(table, self.size, position, 1)
        return slot


class Manager(BlockManager):
    """The engine's block manager, which appends as many blocks as `blocks_to_append` says."""

    def num_needed(self, seq: Sequence, num_tokens: int) -> int:
        blocks = blocks_to_append(list(seq.block_table), self.block_size, 0, num_tokens)
        return int(blocks) + (self._shared_block(seq) is not None)


def test_random_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "OracleRunner", Runner)
    for seed in range(40):
        check_history(seed, managers=SimpleNamespace(BlockManager=Manager))
