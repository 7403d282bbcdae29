"""Checks `update` and `merge`: python -m lessons build softmax --check FILE"""

from functools import reduce
from typing import Any

import pytest
import torch
from build_check import expect, load, same
from torch import Tensor, tensor

from lessons.lesson10b_paged_attention import BLOCK, paged_tiles

NAMES = ("update", "merge")
FUNCTIONS = dict(zip(NAMES, load("softmax.py", *NAMES), strict=True))
State = tuple[Tensor, Tensor, Tensor]


def call(name: str, *arguments: Any) -> State:
    """Call the solution's function, which must not change its arguments."""
    given = [x for a in arguments for x in (a if isinstance(a, tuple) else [a])]
    copies = [x.clone() for x in given]
    state: State = FUNCTIONS[name](*arguments)
    unchanged = all(
        a.nan_to_num().equal(b.nan_to_num()) for a, b in zip(given, copies, strict=True)
    )
    expect(unchanged, f"`{name}` should not change its arguments.")
    return state


def start(values: Tensor) -> State:
    zeros = torch.zeros_like(values[0])
    return zeros.new_tensor(-torch.inf), zeros.new_tensor(0), zeros


def compare(state: State, scores: Tensor, values: Tensor, what: str) -> None:
    got, want = state[2] / state[1], scores.softmax(0) @ values
    error = 1e-4 if scores.dtype is torch.float32 else 1e-10
    expect(
        got.shape == want.shape and torch.allclose(got.to(want), want, rtol=error, atol=error),
        f"{what}: acc / l should be {want.tolist()}, but it is {got.tolist()}.",
    )


def compare_tiles(scores: Tensor, values: Tensor, size: int, what: str) -> None:
    """Compare the tiles one after another, and two parts that `merge` joins."""
    tiles = [*zip(scores.split(size), values.split(size), strict=True)]
    state = start(values)
    for tile in tiles:
        state = call("update", state, *tile)
    compare(state, scores, values, what)
    parts = [call("update", start(values), *tile) for tile in tiles]
    for direction, order in (("first to last", parts), ("last to first", parts[::-1])):
        joined = reduce(lambda one, other: call("merge", one, other), order)
        compare(joined, scores, values, f"{what}, merged from {direction}")


def test_the_example() -> None:
    state = start(torch.zeros(1, 1))
    for number, (scores, values, want) in enumerate(
        [([1.0, 2.0], [[10.0], [20.0]], [2.0, 1.37, 23.68]), ([3.0], [[30.0]], [3.0, 1.5, 38.71])],
        1,
    ):
        state = call("update", state, tensor(scores), tensor(values))
        same(
            [round(float(x), 2) for x in state], want, f"The example: m, l, acc after tile {number}"
        )


@pytest.mark.parametrize("order", ["rising", "falling", "any", "with equal scores"])
def test_tiles(order: str) -> None:
    torch.manual_seed(0)
    scores, values = 5 * torch.randn(50), torch.randn(50, 4)
    if order in ("rising", "falling"):
        scores = scores.sort(descending=order == "falling").values
    elif order == "with equal scores":
        scores = scores.sign()
    for size in (1, 7, 50):
        compare_tiles(scores, values, size, f"50 scores in tiles of {size} ({order})")


@pytest.mark.parametrize("shift", [1000.0, -1000.0, -30000.0])
def test_large_scores(shift: float) -> None:
    scores, values = tensor([1.0, 2.0, 0.5, 3.0]), torch.arange(8.0).view(4, 2)
    compare_tiles(scores + shift, values, 2, f"Scores around {shift:g}")


def test_scores_that_differ_much() -> None:
    scores, values = tensor([0.0, 1000, 0, -1000, 999, 0]), torch.arange(12.0).view(6, 2)
    for size in (3, 1):
        compare_tiles(scores, values, size, f"Scores {scores.tolist()} in tiles of {size}")
    scores, values = tensor([-40.0, 0, -13]), tensor([[1e6], [1], [1e6]])
    compare_tiles(
        scores, values, 1, f"Scores {scores.tolist()}, values {values.flatten().tolist()}"
    )


@pytest.mark.parametrize("shift", [0.0, -1000.0])
@pytest.mark.parametrize("hidden", [[0, 1], [2, 3], [4, 5], [0], [3], [2, 5]], ids=str)
def test_hidden_scores(hidden: list[int], shift: float) -> None:
    torch.manual_seed(0)
    scores, values = tensor([1.0, 2.0, 0.5, 3.0, 1.5, 1.0]) + shift, torch.randn(6, 2)
    scores[hidden] = -torch.inf
    compare_tiles(scores, values, 2, f"Scores {scores.tolist()} in tiles of 2")


def test_in_float64() -> None:
    """What float32 rounds away in any case may not be left out here."""
    torch.manual_seed(0)
    scores, values = torch.randn(50).double(), torch.randn(50, 4).double()
    for scale in (1, 4):
        compare_tiles(scale * scores, values, 7, "50 scores in float64, in tiles of 7")


def test_merge_with_nothing() -> None:
    torch.manual_seed(0)
    for shift in (0, -1000):
        scores, values = torch.randn(10) + shift, torch.randn(10, 4)
        nothing = call("merge", start(values), start(values))
        expect(not any(x.isnan().any() for x in nothing), "Nothing merged with nothing has NaN.")
        hidden = call("update", start(values), torch.full((10,), -torch.inf), values)
        same(float(hidden[1]), 0.0, "l after a tile whose scores are all -inf")
        part = call("update", start(values), scores, values)
        what = f"Scores around {shift}, merged with nothing"
        compare(call("merge", nothing, part), scores, values, f"{what} on the left")
        compare(call("merge", part, nothing), scores, values, f"{what} on the right")


def test_through_a_block_table() -> None:
    torch.manual_seed(0)
    table, length = torch.randperm(20)[:19] + 1, 300
    kv, q = torch.randn(2, 21, BLOCK, 8), torch.randn(8)
    positions = torch.arange(length)
    keys, values = kv[:, table[positions // BLOCK], positions % BLOCK]
    state = start(values)
    for k, v in paged_tiles(kv, table, 0, length):
        state = call("update", state, k @ q, v)
    compare(state, keys @ q, values, "300 keys, gathered through a block table")
