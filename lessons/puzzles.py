"""The Triton kernels of lesson 10a, each with a check. From `# puzzle` to `# end` they are hidden.

A check returns what the kernel computed and what torch computes. This module is imported by
`lesson.optional` only.
"""

import math
import textwrap
from collections.abc import Callable
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
    # puzzle
    tl.store(out + i, a + b, mask=i < n)
    # end


@triton.jit
def softmax(x, out, stride, n, SIZE: tl.constexpr):
    # Each program computes the softmax of one row of n numbers, SIZE >= n. The rows of x and out
    # begin `stride` numbers apart. A masked load gives `other`, whose exp is 0.
    row = tl.program_id(0)
    i = tl.arange(0, SIZE)
    scores = tl.load(x + row * stride + i, mask=i < n, other=float("-inf"))
    # puzzle
    weights = tl.exp(scores - tl.max(scores, 0))
    # end
    tl.store(out + row * stride + i, weights / tl.sum(weights, 0), mask=i < n)


@triton.jit
def product(x, y, out, inner, columns, SIZE: tl.constexpr):
    # out = x @ y: x is [rows, inner], y is [inner, columns], all sizes are multiples of SIZE. Each
    # program computes one tile [SIZE, SIZE] of out and walks over the inner dimension in tiles.
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
    # out [D] = softmax(scores [n]) @ values [n, D], SIZE scores at a time. m is the largest score
    # so far, total (l in the papers) is the sum of exp(score - m), and acc is the sum of
    # exp(score - m) * value. A larger m makes both earlier sums too large by the same factor.
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
    # Attention of one query q[s, h], D numbers, of each sequence s and query head h, in the program
    # (s, h). The sequence has lengths[s] positions. Their keys and values are in keys[slot, g] and
    # values[slot, g], D numbers each, where HEADS query heads share the KV head g = h // HEADS.
    # tables[s, b], of BLOCKS columns, is the physical block of logical block b; it has BLOCK slots.
    # Other slots contain NaN. out[s, h] = softmax(keys @ q) @ values.
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


class Observed:
    """A kernel, and in the interpreter what each program of its first launch loads and stores."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.programs: dict[tuple[int, ...], list[str]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            if self.programs or torch.cuda.is_available():
                self.kernel[grid](*args)
                return
            # Triton has no public hook for loads and stores. Without these there is no picture.
            from triton.runtime.interpreter import interpreter_builder as builder

            tensors = dict(zip(self.kernel.arg_names, args, strict=False))

            def noted(method: Callable[..., Any], sign: str, mask: int) -> Callable[..., Any]:
                def note(*parts: Any) -> Any:  # the pointers are first
                    part = describe(tensors, parts[0].data[parts[mask].data])
                    program = builder.grid_idx[: len(grid)]
                    self.programs.setdefault(program, []).append(sign + part)
                    return method(*parts)

                return note

            try:
                builder.create_masked_load = noted(builder.create_masked_load, "", 1)
                builder.create_masked_store = noted(builder.create_masked_store, "-> ", 2)
                self.kernel[grid](*args)
            finally:
                del builder.create_masked_load, builder.create_masked_store

        return launch

    def picture(self) -> str:
        """Return lines for the first and for the last program."""
        ends, lines = [*self.programs][:1] + [*self.programs][1:][-1:], list[str]()
        for program in ends:
            name = f"    program {', '.join(map(str, program))}:  "
            parts = ", ".join(part.replace(" ", "\0") for part in self.programs[program][:24])
            wrapped = textwrap.wrap(parts, 100 - len(name))  # a part stays on one line
            lines += [
                (name if i == 0 else " " * len(name)) + text for i, text in enumerate(wrapped)
            ]
        return "\n".join(lines).replace("\0", " ")


def describe(tensors: dict[str, Any], addresses: Any) -> str:
    """Return the part of a tensor that is at these addresses, such as "x[0:8]", or "nothing"."""
    if not addresses.size:
        return "nothing"
    for name, x in tensors.items():
        if isinstance(x, Tensor):
            offsets = torch.tensor(addresses.astype("int64") - x.data_ptr()) // x.element_size()
            inside = offsets[(offsets >= 0) & (offsets < x.numel())]
            if len(inside):
                places = torch.unravel_index(inside, x.shape)
                ends = [(int(i.min()), int(i.max()) + 1) for i in places]
                is_whole = math.prod(b - a for a, b in ends) == len(inside.unique())
                more = "" if is_whole else " (a part)"
                more += " and beyond" if len(inside) < len(offsets) else ""
                sides = (f"{a}:{b}" if b - a > 1 else f"{a}" for a, b in ends)
                return f"{name}[{', '.join(sides)}]{more}"
    return "memory of no tensor"


def place(x: Tensor) -> Tensor:
    """Copy x into a much larger tensor of NaN. A wrong offset then reads NaN and does not crash."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    filler = torch.nan if x.is_floating_point() else 0
    memory = torch.full((x.numel() + 2**19,), filler, dtype=x.dtype, device=device)
    view = memory[2**18 : 2**18 + x.numel()].view(x.shape)
    return view.copy_(x)


def random(*shape: int) -> Tensor:
    """Return numbers that are the same in every run."""
    return place(3 * torch.randn(shape, generator=torch.Generator().manual_seed(0)))


def check_add(kernel: Any) -> tuple[Tensor, Tensor]:
    got, want = [], []
    for n in (19, 6):  # what follows the n numbers must not be changed
        x, y, out = random(21), random(22), place(torch.full((21,), -1.0))
        kernel[(triton.cdiv(n, SIZE),)](x, y, out, n, SIZE)
        got.append(out)
        want += [(random(21) + random(22)[:21])[:n], out.new_full((21 - n,), -1.0)]
    return torch.cat(got), torch.cat(want)


def check_softmax(kernel: Any) -> tuple[Tensor, Tensor]:
    shift = torch.tensor([[1000.0], [-1000.0], [0.0]])  # exp(1000) is infinite, exp(-1000) is 0
    x, out = place(random(3, 6) + shift.to(random(1).device)), place(torch.zeros(3, 6))
    kernel[(3,)](x, out, 6, 5, 8)
    return out[:, :5], x[:, :5].softmax(1)


def check_product(kernel: Any) -> tuple[Tensor, Tensor]:
    x, y, out = random(32, 48), random(48, 64), place(torch.zeros(32, 64))
    kernel[(2, 4)](x, y, out, 48, 64, 16)
    return out, x @ y


def check_online_softmax(kernel: Any) -> tuple[Tensor, Tensor]:
    # m rises in the second tile and not in the third. All tiles have weights that matter.
    # The second time the first tile has much larger scores than the others.
    values, got, want = random(20, 4), [], []
    for largest in (0, 200):
        scores, out = place(torch.linspace(0, 4, 20).roll(-4)), place(torch.zeros(4))
        scores[0] += largest
        kernel[(1,)](scores, values, out, 20, 8, 4)
        got.append(out)
        want.append(scores.softmax(0) @ values)
    return torch.cat(got), torch.cat(want)


def check_paged(kernel: Any) -> tuple[Tensor, Tensor]:
    # Scores are small, so that a masked position would have a weight that matters.
    q, cache, out = place(random(2, 4, 8) / 10), random(2, 32, 2, 8), place(torch.zeros(2, 4, 8))
    tables, lengths = torch.tensor([[5, 2, 7], [1, 3, 0]]), torch.tensor([10, 8])
    keys, values = (place(torch.full_like(x, torch.nan)) for x in cache)  # slots of nobody
    want = torch.zeros(2, 4, 8)
    for s, n in enumerate(lengths):
        used = tables[s].repeat_interleave(4)[:n] * 4 + torch.arange(n) % 4
        keys[used], values[used] = cache[0, used], cache[1, used]
        k, v = (x[used].repeat_interleave(2, 1).cpu() for x in (keys, values))
        weights = torch.einsum("hd,nhd->hn", q[s].cpu(), k).softmax(1)
        want[s] = torch.einsum("hn,nhd->hd", weights, v)
    tables, lengths = place(tables), place(lengths)
    kernel[(2, 4)](q, keys, values, tables, lengths, out, 3, 2, 4, 8)
    return out, want.to(out.device)
