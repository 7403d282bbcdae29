"""The Triton kernels of lesson 10a, each with a check. From `# puzzle` to `# end` they are hidden.

A check is the grid and the arguments of a launch, and what `out` should be then.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Triton has no public hook for loads and stores, which are methods of this object.
from triton.runtime.interpreter import interpreter_builder as builder

from lessons.puzzle_it import describe

Check = tuple[tuple[int, ...], tuple[Any, ...], Tensor]


@triton.jit
def double(x, out, n, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = i < n
    a = tl.load(x + i, mask=mask, other=0.0)
    tl.store(out + i, 2 * a, mask=mask)


@triton.jit
def add(x, y, out, n, SIZE: tl.constexpr):
    # Vector add: out = x + y. All point to n numbers. Each program adds SIZE of them; the last one
    # may have fewer. The missing line stores the sums, and must change nothing after n numbers.
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    a = tl.load(x + i, mask=i < n)
    b = tl.load(y + i, mask=i < n)
    # puzzle
    tl.store(out + i, a + b, mask=i < n)
    # end


@triton.jit
def softmax(x, out, n, SIZE: tl.constexpr):
    # Softmax of each row of a matrix: a program computes one row of n numbers, SIZE >= n. The
    # missing line computes `weights`. The check has a row of numbers near 1,000, and one of numbers
    # near -1,000: exp of them is infinite, or 0, in float32. exp(-inf) is 0.
    row, i = tl.program_id(0), tl.arange(0, SIZE)
    scores = tl.load(x + row * n + i, mask=i < n, other=float("-inf"))
    # puzzle
    weights = tl.exp(scores - tl.max(scores, 0))
    # end
    tl.store(out + row * n + i, weights / tl.sum(weights, 0), mask=i < n)


@triton.jit
def product(x, y, out, inner, columns, SIZE: tl.constexpr):
    # Product of two matrices: out = x @ y. x is [rows, inner], y is [inner, columns], all sizes are
    # multiples of SIZE. Each program computes one tile [SIZE, SIZE] of out. The missing loop adds
    # products of tiles: tl.dot(a, b, input_precision="ieee") is the product of two.
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)  # rows of the tile
    j = tl.program_id(1) * SIZE + tl.arange(0, SIZE)  # its columns
    tile = tl.zeros([SIZE, SIZE], tl.float32)
    # puzzle
    for start in range(0, inner, SIZE):
        k = start + tl.arange(0, SIZE)
        a = tl.load(x + i[:, None] * inner + k[None, :])
        b = tl.load(y + k[:, None] * columns + j[None, :])
        tile += tl.dot(a, b, input_precision="ieee")
    # end
    tl.store(out + i[:, None] * columns + j[None, :], tile)


@triton.jit
def online_softmax(scores, values, out, n, SIZE: tl.constexpr, D: tl.constexpr):
    # Online softmax: out [D] = softmax(scores [n]) @ values [n, D], SIZE scores at a time. m is the
    # largest score so far, total the sum of exp(score - m), acc the sum of exp(score - m) * value.
    # The missing loop updates them. When m rises, the sums so far are multiplied by a factor.
    d = tl.arange(0, D)
    m, total = float("-inf"), 0.0
    acc = tl.zeros([D], tl.float32)
    # puzzle
    for start in range(0, n, SIZE):
        i = start + tl.arange(0, SIZE)
        s = tl.load(scores + i, mask=i < n, other=float("-inf"))
        v = tl.load(values + i[:, None] * D + d[None, :], mask=(i < n)[:, None], other=0.0)
        new_m = tl.maximum(m, tl.max(s, 0))
        factor, weights = tl.exp(m - new_m), tl.exp(s - new_m)
        total = total * factor + tl.sum(weights, 0)
        acc = acc * factor + tl.sum(weights[:, None] * v, 0)
        m = new_m
    # end
    tl.store(out + d, acc / total)


@triton.jit
def paged(
    q, keys, values, tables, lengths, out, BLOCKS, HEADS, BLOCK: tl.constexpr, D: tl.constexpr
):
    # Paged attention: out[s, h] = softmax(keys @ q) @ values of one query q[s, h], D numbers, of
    # sequence s and query head h, in the program (s, h), by the loop of puzzle 4. The sequence has
    # lengths[s] positions. Their keys and values are keys[slot, g] and values[slot, g], D numbers
    # each, where HEADS query heads share the KV head g = h // HEADS. tables[s, b], of BLOCKS
    # columns, is the physical block of logical block b. It has BLOCK slots. Others contain NaN.
    #
    #     position    [  0  1  2  3 |  4  5  6  7 |  8  9  .  . ]   lengths[0] = 10
    #     tables[0]         5             2             7           BLOCK = 4
    #     slot          20 21 22 23    8  9 10 11   28 29
    # puzzle
    s, h = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    d = tl.arange(0, D)
    query = tl.load(q + (s * heads + h) * D + d)
    n = tl.load(lengths + s)
    m, total = float("-inf"), 0.0
    acc = tl.zeros([D], tl.float32)
    for start in range(0, n, BLOCK):
        position = start + tl.arange(0, BLOCK)
        slot = tl.load(tables + s * BLOCKS + start // BLOCK) * BLOCK + position % BLOCK
        where = (slot[:, None] * (heads // HEADS) + h // HEADS) * D + d[None, :]
        mask = (position < n)[:, None]
        k = tl.load(keys + where, mask=mask, other=0.0)
        v = tl.load(values + where, mask=mask, other=0.0)
        scores = tl.where(position < n, tl.sum(k * query[None, :], 1), float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 0))
        factor, weights = tl.exp(m - new_m), tl.exp(scores - new_m)
        total = total * factor + tl.sum(weights, 0)
        acc = acc * factor + tl.sum(weights[:, None] * v, 0)
        m = new_m
    tl.store(out + (s * heads + h) * D + d, acc / total)
    # end


def launch(kernel: Any, name: str, programs: dict[Any, list[str]]) -> tuple[Tensor, Tensor]:
    """Run a kernel as its check says, and note what programs load and store -> `out`, torch's."""
    grid, args, want = globals()[f"check_{name}"]()
    named = zip(globals()[name].arg_names, args, strict=True)
    tensors = {name: x for name, x in named if isinstance(x, Tensor)}

    def noted(method: Callable[..., Any], sign: str, mask: int) -> Callable[..., Any]:
        def note(*parts: Any) -> Any:  # the pointers are first
            part = sign + describe(tensors, parts[0].data[parts[mask].data])
            programs.setdefault(builder.grid_idx[: len(grid)], []).append(part)
            return method(*parts)

        return note

    load = noted(builder.create_masked_load, "", 1)
    store = noted(builder.create_masked_store, "-> ", 2)
    with mock.patch.multiple(builder, create_masked_load=load, create_masked_store=store):
        kernel[grid](*args)
    return tensors["out"], want


def place(x: Tensor) -> Tensor:
    """Copy x into a much larger tensor of NaN. A wrong offset then reads NaN and does not crash."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    filler = torch.nan if x.is_floating_point() else 0
    memory = torch.full((x.numel() + 2**19,), filler, dtype=x.dtype, device=device)
    return memory[2**18 : 2**18 + x.numel()].view(x.shape).copy_(x)


def random(*shape: int) -> Tensor:
    """Return numbers that are the same in every run."""
    return place(3 * torch.randn(shape, generator=torch.Generator().manual_seed(0)))


def check_add() -> Check:
    x = random(19)
    y = random(20)
    out = place(torch.full((21,), -1.0))
    # What follows the 19 numbers must not be changed.
    return (3,), (x, y, out, 19, 8), torch.cat((x + y[:19], out[19:]))


def check_softmax() -> Check:
    shift = torch.tensor([[1000.0], [-1000.0], [0.0]])  # exp(1000) is infinite, exp(-1000) is 0
    x = place(random(3, 5).cpu() + shift)
    out = place(torch.zeros(3, 5))
    return (3,), (x, out, 5, 8), x.softmax(1)


def check_product() -> Check:
    x = random(32, 48)
    y = random(48, 64)
    out = place(torch.zeros(32, 64))
    return (2, 4), (x, y, out, 48, 64, 16), x @ y


def check_online_softmax() -> Check:
    # m rises in the third tile and not in the second, whose scores are much lower.
    scores = torch.cat((torch.linspace(0, 2, 8), torch.full((8,), -200.0), torch.arange(2.0, 6)))
    scores = place(scores)
    values = random(20, 4)
    out = place(torch.zeros(4))
    return (1,), (scores, values, out, 20, 8, 4), scores.softmax(0) @ values


def check_paged() -> Check:
    # Scores are small, so that a masked position would have a weight that matters.
    q = place(random(2, 4, 8) / 10)
    kv = random(2, 32, 2, 8)
    out = place(torch.zeros(2, 4, 8))
    tables = place(torch.tensor([[5, 2, 7], [1, 3, 0]]))
    lengths = place(torch.tensor([10, 8]))
    cache = torch.full_like(kv, torch.nan)
    want = torch.zeros_like(out)
    for s, n in enumerate(lengths.tolist()):
        slots = (4 * tables[s][:, None] + torch.arange(4).to(tables)).flatten()[:n]
        cache[:, slots] = kv[:, slots]
        k, v = kv[:, slots].transpose(1, 2).repeat_interleave(2, 1)  # [4, n, 8]
        want[s] = scaled_dot_product_attention(q[s][:, None], k, v, scale=1)[:, 0]
    return (2, 4), (q, place(cache[0]), place(cache[1]), tables, lengths, out, 3, 2, 4, 8), want
