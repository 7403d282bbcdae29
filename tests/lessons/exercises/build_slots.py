"""Checks `slots` and `blocks_to_append`: python -m lessons build slots --check FILE"""

from types import SimpleNamespace

import pytest
from build_check import OracleRunner, check_history, expect, load

from lessons.oracle import oracle
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

slots, blocks_to_append = load("slots.py", "slots"), load("slots.py", "blocks_to_append")


@pytest.mark.parametrize(
    ("table", "size", "start", "count", "want"),
    [
        ([7, 2], 4, 2, 4, [30, 31, 8, 9]),
        ([7, 2], 4, 0, 8, [28, 29, 30, 31, 8, 9, 10, 11]),
        ([3, 1, 2], 1, 1, 2, [1, 2]),
        ([5], 16, 15, 1, [95]),
        ([5], 16, 3, 0, []),
    ],
)
def test_slots(table: list[int], size: int, start: int, count: int, want: list[int]) -> None:
    given = list(table)
    got = slots(table, size, start, count)
    expect(
        got == want,
        f"Blocks of {size} slots and the block table {given}: {count} positions from {start} on "
        f"should have the slots {want}, but yours have {got}.",
    )
    expect(table == given, f"The block table {given} was changed to {table}.")


@pytest.mark.parametrize(
    ("table", "size", "start", "count", "want"),
    [
        ([7, 2], 4, 6, 3, 1),
        ([7, 2], 4, 6, 2, 0),
        ([], 4, 0, 9, 3),
        ([], 4, 0, 8, 2),
        ([7, 2, 1], 4, 0, 4, 0),
        ([], 4, 0, 0, 0),
    ],
)
def test_blocks_to_append(table: list[int], size: int, start: int, count: int, want: int) -> None:
    got = blocks_to_append(table, size, start, count)
    expect(
        got == want,
        f"Blocks of {size} slots and the block table {table}: to hold {count} positions from "
        f"{start} on, {want} blocks should be appended, but yours says {got}.",
    )


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
