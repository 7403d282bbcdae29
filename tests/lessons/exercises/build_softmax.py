"""Checks `update` and `merge`: python -m lessons build softmax --check FILE"""

import pytest
import torch
from build_check import expect, load
from torch import Tensor, tensor

from lessons.lesson10b_paged_attention import BLOCK, paged_tiles

update, merge = load("softmax.py", "update"), load("softmax.py", "merge")
INF = float("inf")


def start(dim: int) -> tuple[Tensor, Tensor, Tensor]:
    return tensor(-INF), tensor(0.0), torch.zeros(dim)


def attend(tiles: list[tuple[Tensor, Tensor]], dim: int) -> tuple[Tensor, Tensor, Tensor]:
    state = start(dim)
    for scores, values in tiles:
        state = update(state, scores, values)
    return state


def compare(state: tuple[Tensor, Tensor, Tensor], want: Tensor, what: str) -> None:
    got = state[2] / state[1]
    expect(
        got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=1e-4),
        f"{what}: acc / l should be {want.tolist()}, but it is {got.tolist()}.",
    )


def test_the_example() -> None:
    first = update(start(1), tensor([1.0, 2.0]), tensor([[10.0], [20.0]]))
    got = [round(float(x), 2) for x in first]
    expect(
        got == [2.0, 1.37, 23.68],
        f"After the first tile m, l, acc should be [2.0, 1.37, 23.68], not {got}.",
    )
    second = update(first, tensor([3.0]), tensor([[30.0]]))
    got = [round(float(x), 2) for x in second]
    expect(
        got == [3.0, 1.5, 38.71], f"After the second they should be [3.0, 1.5, 38.71], not {got}."
    )


@pytest.mark.parametrize("order", ["rising", "falling", "any"])
def test_tiles(order: str) -> None:
    torch.manual_seed(0)
    scores, values = 5 * torch.randn(50), torch.randn(50, 4)
    if order != "any":
        scores = scores.sort(descending=order == "falling").values
    for size in (1, 7, 50):
        tiles = list(zip(scores.split(size), values.split(size), strict=True))
        what = f"50 scores in tiles of {size} ({order})"
        compare(attend(tiles, 4), scores.softmax(0) @ values, what)


@pytest.mark.parametrize("shift", [1000.0, -1000.0])
def test_large_scores(shift: float) -> None:
    scores, values = tensor([1.0, 2.0, 0.5, 3.0]), torch.arange(8.0).view(4, 2)
    tiles = list(zip((scores + shift).split(2), values.split(2), strict=True))
    compare(attend(tiles, 2), scores.softmax(0) @ values, f"Scores around {shift:g}")


@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_hidden_scores(hidden: int) -> None:
    scores, values = tensor([1.0, 2.0, 0.5, 3.0, 1.5, 1.0]), torch.randn(6, 2)
    scores[2 * hidden : 2 * hidden + 2] = -INF
    tiles = list(zip(scores.split(2), values.split(2), strict=True))
    what = f"All scores of tile {hidden} of 3 are -inf"
    compare(attend(tiles, 2), scores.softmax(0) @ values, what)


def test_merge() -> None:
    torch.manual_seed(0)
    scores, values = 5 * torch.randn(30), torch.randn(30, 4)
    parts = [
        update(start(4), s, v) for s, v in zip(scores.split(10), values.split(10), strict=True)
    ]
    want = scores.softmax(0) @ values
    for order in ((0, 1, 2), (2, 1, 0)):
        merged = merge(merge(parts[order[0]], parts[order[1]]), parts[order[2]])
        compare(merged, want, f"Three parts, merged in the order {order}")
    compare(merge(start(4), parts[0]), scores[:10].softmax(0) @ values[:10], "Merged with nothing")
    state = merge(start(4), start(4))
    expect(not any(x.isnan().any() for x in state), "Nothing merged with nothing has NaN.")


def test_through_a_block_table() -> None:
    torch.manual_seed(0)
    table, length = torch.randperm(20)[:19] + 1, 300
    kv, q = torch.randn(2, 21, BLOCK, 8), torch.randn(8)
    positions = torch.arange(length)
    keys, values = kv[:, table[positions // BLOCK], positions % BLOCK]
    state = start(8)
    for k, v in paged_tiles(kv, table, 0, length):
        state = update(state, k @ q, v)
    compare(state, (keys @ q).softmax(0) @ values, "300 keys, gathered through a block table")
