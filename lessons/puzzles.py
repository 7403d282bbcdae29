"""The Triton kernels of lesson 10a, each with a check. A line that ends with `# puzzle` is hidden.

A check runs the kernel of a module, this one or a copy with a reader's line, and returns what it
computed and what torch computes. It is imported by `lesson.optional` only.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 8  # numbers that a program of the first puzzle computes


@triton.jit
def double(x, out, n, SIZE: tl.constexpr):
    program = tl.program_id(0)
    i = program * SIZE + tl.arange(0, SIZE)
    mask = i < n
    a = tl.load(x + i, mask=mask, other=0.0)
    b = a * 2
    tl.store(out + i, b, mask=mask)


@triton.jit
def add(x, y, out, n, SIZE: tl.constexpr):
    # x, y and out point to n numbers. Each program adds SIZE of them; the last one may have fewer.
    program = tl.program_id(0)
    i = program * SIZE + tl.arange(0, SIZE)
    a = tl.load(x + i, mask=i < n)
    b = tl.load(y + i, mask=i < n)
    tl.store(out + i, a + b, mask=i < n)  # puzzle


@triton.jit
def softmax(x, out, stride, n, SIZE: tl.constexpr):
    # Each program computes the softmax of one row of n numbers, SIZE >= n. The rows of x and out
    # begin `stride` numbers apart. A masked load gives `other`, whose exp is 0.
    row = tl.program_id(0)
    i = tl.arange(0, SIZE)
    scores = tl.load(x + row * stride + i, mask=i < n, other=float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 0))  # puzzle
    tl.store(out + row * stride + i, weights / tl.sum(weights, 0), mask=i < n)


@triton.jit
def product(x, y, out, inner, columns, SIZE: tl.constexpr):
    # out = x @ y: x is [rows, inner], y is [inner, columns], all sizes are multiples of SIZE. Each
    # program computes one tile [SIZE, SIZE] of out and walks over the inner dimension in tiles.
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)  # rows of the tile
    j = tl.program_id(1) * SIZE + tl.arange(0, SIZE)  # its columns
    tile = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, inner, SIZE):
        k = start + tl.arange(0, SIZE)
        a = tl.load(x + i[:, None] * inner + k[None, :])
        b = tl.load(y + k[:, None] * columns + j[None, :])  # puzzle
        tile += tl.dot(a, b, input_precision="ieee")
    tl.store(out + i[:, None] * columns + j[None, :], tile)


@triton.jit
def online_softmax(scores, values, out, n, SIZE: tl.constexpr, D: tl.constexpr):
    # out [D] = softmax(scores [n]) @ values [n, D], SIZE scores at a time. m is the largest score
    # so far, total (l in the papers) is the sum of exp(score - m), and acc is the sum of
    # exp(score - m) * value. A larger m makes both earlier sums too large by the same factor.
    d = tl.arange(0, D)
    m, total = float("-inf"), 0.0
    acc = tl.zeros([D], tl.float32)
    for start in range(0, n, SIZE):
        i = start + tl.arange(0, SIZE)
        s = tl.load(scores + i, mask=i < n, other=float("-inf"))
        v = tl.load(values + i[:, None] * D + d[None, :], mask=(i < n)[:, None], other=0.0)
        new_m = tl.maximum(m, tl.max(s, 0))
        factor = tl.exp(m - new_m)  # puzzle
        weights = tl.exp(s - new_m)
        total = total * factor + tl.sum(weights, 0)
        acc = acc * factor + tl.sum(weights[:, None] * v, 0)
        m = new_m
    tl.store(out + d, acc / total)


@triton.jit
def paged(q, keys, values, table, out, n, BLOCK: tl.constexpr, D: tl.constexpr):
    # Attention of one query q [D] over n positions, whose keys and values are in the slots
    # [slots, D] of a paged cache: table[b] is the physical block of logical block b, BLOCK slots.
    d = tl.arange(0, D)
    query = tl.load(q + d)
    m, total = float("-inf"), 0.0
    acc = tl.zeros([D], tl.float32)
    for start in range(0, n, BLOCK):
        position = start + tl.arange(0, BLOCK)
        slot = tl.load(table + position // BLOCK) * BLOCK + position % BLOCK  # puzzle
        where, mask = slot[:, None] * D + d[None, :], (position < n)[:, None]
        k = tl.load(keys + where, mask=mask, other=0.0)
        v = tl.load(values + where, mask=mask, other=0.0)
        s = tl.where(position < n, tl.sum(k * query[None, :], 1), float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 0))
        factor, weights = tl.exp(m - new_m), tl.exp(s - new_m)
        total = total * factor + tl.sum(weights, 0)
        acc = acc * factor + tl.sum(weights[:, None] * v, 0)
        m = new_m
    tl.store(out + d, acc / total)


def place(x: Tensor) -> Tensor:
    """Copy x into a much larger tensor of NaN. A wrong offset then reads NaN and does not crash."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = torch.full((x.numel() + 2**19,), torch.nan, device=device)
    view = memory[2**18 : 2**18 + x.numel()].view(x.shape)
    return view.copy_(x)


def random(*shape: int) -> Tensor:
    """Return numbers that are the same in every run."""
    return place(3 * torch.randn(shape, generator=torch.Generator().manual_seed(0)))


def check_add(kernels: Any) -> tuple[Tensor, Tensor]:
    got, want = [], []
    for n in (19, 6):  # what follows the n numbers must not be changed
        x, y, out = random(21), random(22), place(torch.full((21,), -1.0))
        kernels.add[(triton.cdiv(n, SIZE),)](x, y, out, n, SIZE)
        got.append(out)
        want += [(random(21) + random(22)[:21])[:n], out.new_full((21 - n,), -1.0)]
    return torch.cat(got), torch.cat(want)


def check_softmax(kernels: Any) -> tuple[Tensor, Tensor]:
    shift = torch.tensor([[1000.0], [-1000.0], [0.0]])  # exp(1000) is infinite, exp(-1000) is 0
    x, out = place(random(3, 6) + shift.to(random(1).device)), place(torch.zeros(3, 6))
    kernels.softmax[(3,)](x, out, 6, 5, 8)
    return out[:, :5], x[:, :5].softmax(1)


def check_product(kernels: Any) -> tuple[Tensor, Tensor]:
    x, y, out = random(32, 48), random(48, 64), place(torch.zeros(32, 64))
    kernels.product[(2, 4)](x, y, out, 48, 64, 16)
    return out, x @ y


def check_online_softmax(kernels: Any) -> tuple[Tensor, Tensor]:
    # m rises in the second tile and not in the third. All tiles have weights that matter.
    scores, values = place(torch.linspace(0, 4, 20).roll(-4)), random(20, 4)
    out = place(torch.zeros(4))
    kernels.online_softmax[(1,)](scores, values, out, 20, 8, 4)
    return out, scores.softmax(0) @ values


def check_paged(kernels: Any) -> tuple[Tensor, Tensor]:
    q, cache, n, out = random(8), random(2, 32, 8), 10, place(torch.zeros(8))
    table = torch.tensor([0] * 99 + [5, 2, 7] + [0] * 99, device=q.device)[99:-99]
    used = table.repeat_interleave(4)[:n] * 4 + torch.arange(n, device=q.device) % 4
    keys, values = (place(torch.full_like(x, torch.nan)) for x in cache)  # slots of other sequences
    keys[used], values[used] = cache[0, used], cache[1, used]
    kernels.paged[(1,)](q, keys, values, table, out, n, 4, 8)
    return out, (keys[used] @ q).softmax(0) @ values[used]
