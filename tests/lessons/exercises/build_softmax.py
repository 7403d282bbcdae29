"""Checks `update` and `merge`: python -m lessons build softmax --check FILE"""

from functools import reduce

import pytest
import torch
from build_check import expect, load, same
from torch import Tensor, tensor

from lessons.lesson10b_paged_attention import BLOCK, paged_tiles

update, merge = load("softmax.py", "update", "merge")
State = tuple[Tensor, Tensor, Tensor]


def start(dim: int) -> State:
    return tensor(-torch.inf), tensor(0.0), torch.zeros(dim)


def compare(state: State, scores: Tensor, values: Tensor, what: str) -> None:
    got, want = state[2] / state[1], scores.softmax(0) @ values
    expect(
        got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=1e-4),
        f"{what}: acc / l should be {want.tolist()}, but it is {got.tolist()}.",
    )


def compare_tiles(scores: Tensor, values: Tensor, size: int, what: str) -> None:
    state = start(values.shape[1])
    for tile in zip(scores.split(size), values.split(size), strict=True):
        before = [x.nan_to_num() for x in state]
        new = update(state, *tile)
        unchanged = all(torch.equal(a, b.nan_to_num()) for a, b in zip(before, state, strict=True))
        expect(unchanged, "`update` should not change its arguments.")
        state = new
    compare(state, scores, values, what)


def test_the_example() -> None:
    state = start(1)
    for number, (scores, values, want) in enumerate(
        [([1.0, 2.0], [[10.0], [20.0]], [2.0, 1.37, 23.68]), ([3.0], [[30.0]], [3.0, 1.5, 38.71])],
        1,
    ):
        state = update(state, tensor(scores), tensor(values))
        same(
            [round(float(x), 2) for x in state], want, f"The example: m, l, acc after tile {number}"
        )


@pytest.mark.parametrize("order", ["rising", "falling", "any"])
def test_tiles(order: str) -> None:
    torch.manual_seed(0)
    scores, values = 5 * torch.randn(50), torch.randn(50, 4)
    if order != "any":
        scores = scores.sort(descending=order == "falling").values
    for size in (1, 7, 50):
        compare_tiles(scores, values, size, f"50 scores in tiles of {size} ({order})")


@pytest.mark.parametrize("shift", [1000.0, -1000.0])
def test_large_scores(shift: float) -> None:
    scores, values = tensor([1.0, 2.0, 0.5, 3.0]), torch.arange(8.0).view(4, 2)
    compare_tiles(scores + shift, values, 2, f"Scores around {shift:g}")


@pytest.mark.parametrize("shift", [0.0, -1000.0])
@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_hidden_scores(hidden: int, shift: float) -> None:
    scores, values = tensor([1.0, 2.0, 0.5, 3.0, 1.5, 1.0]) + shift, torch.randn(6, 2)
    scores[2 * hidden : 2 * hidden + 2] = -torch.inf
    what = f"All scores of tile {hidden} of 3 are -inf, and others around {shift:g}"
    compare_tiles(scores, values, 2, what)


def test_merge() -> None:
    torch.manual_seed(0)
    scores, values = 5 * torch.randn(30), torch.randn(30, 4)
    tiles = zip(scores.split(10), values.split(10), strict=True)
    parts = [update(start(4), *tile) for tile in tiles]
    for order in ((0, 1, 2), (2, 1, 0)):
        merged = reduce(merge, (parts[i] for i in order))
        compare(merged, scores, values, f"Three parts, merged in the order {order}")
    compare(merge(start(4), parts[0]), scores[:10], values[:10], "Merged with nothing")
    state = merge(start(4), start(4))
    expect(not any(x.isnan().any() for x in state), "Nothing merged with nothing has NaN.")
    low = scores[:10] - 1000
    merged = merge(state, update(start(4), low, values[:10]))
    compare(merged, low, values[:10], "Nothing, merged with nothing and with scores around -1000")


def test_through_a_block_table() -> None:
    torch.manual_seed(0)
    table, length = torch.randperm(20)[:19] + 1, 300
    kv, q = torch.randn(2, 21, BLOCK, 8), torch.randn(8)
    positions = torch.arange(length)
    keys, values = kv[:, table[positions // BLOCK], positions % BLOCK]
    state = start(8)
    for k, v in paged_tiles(kv, table, 0, length):
        state = update(state, k @ q, v)
    compare(state, keys @ q, values, "300 keys, gathered through a block table")
