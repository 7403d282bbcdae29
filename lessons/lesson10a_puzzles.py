"""Lesson 10a: how a Triton kernel is written.

A GPU kernel is a function that many programs run at the same time, each for a part of the result.
In Triton (Tillet et al. 2019) a program works on tiles: arrays of a fixed size, which it loads from
pointers (addresses in memory), computes with, and stores.

    program      0         1         2        tl.program_id(0)
    index     [ 0 1 2 3 | 4 5 6 7 | 8 9 . . ]   program * 4 + tl.arange(0, 4)
    mask        1 1 1 1   1 1 1 1   1 1 0 0     index < 10

Without a GPU the same code runs in Triton's interpreter, one program after the other, if the
environment variable TRITON_INTERPRET is 1 when Triton is imported. The lessons set it themselves.
"""

import inspect

import torch

from lessons.lesson import optional
from lessons.show import Questions, link, say, show_source, show_table


def run() -> None:
    kernels = optional("lessons.puzzles")
    QUESTIONS.show(1)
    if kernels is None:
        say("Triton is not installed (it exists for Linux only), so no kernel runs here.")
        return
    say("""A kernel, `@triton.jit def double(x, out, n, SIZE: tl.constexpr)`, which doubles the
        numbers 0, 10, ..., 90 in the three programs of the picture above: x and out are pointers to
        the first number, n is 10. SIZE is 4, a constant that is known when the kernel is compiled.
        Each line, and its tile in programs 1 and 2:""")
    rows = [[line.strip()] for line in inspect.getsource(kernels.double.fn).splitlines()[2:]]
    for program in (1, 2):
        i = program * 4 + torch.arange(4)
        a = torch.where(i < 10, 10 * i, 0)
        stored = [str(n) if n else "-" for n in (2 * a).tolist()]
        tiles = [i.tolist(), (i < 10).int().tolist(), a.tolist(), stored]
        for row, numbers in zip(rows, tiles, strict=True):
            row.append(" ".join(map(str, numbers)))
    show_table(("line", "in program 1", "in program 2"), rows)
    tile = torch.tensor([2, 3])[:, None] * 8 + torch.tensor([4, 5, 6, 7])[None, :]
    say(f"""x + i is a tile of pointers, one for each number. A masked load reads nothing and gives
        `other`, and a masked store writes nothing (-). The launch double[(3,)](x, out, 10, 4)
        starts three programs. (3,) is the grid: it has up to three dimensions, and gives the number
        of programs in each. tl.program_id(0) is the program's number in the first dimension.

        A tile of a matrix has two dimensions. The number in row r and column c of a matrix of 8
        columns is r * 8 + c numbers after the first one. With i = [2, 3] and j = [4, 5, 6, 7] the
        expression i[:, None] * 8 + j[None, :] is {tile.tolist()}, a tile of two rows.""")
    say("""Five kernels lead from a sum to the attention of lesson 10b. The puzzles leave out a line
        of the first two, the loop of the next two, and all of the last. tl.exp, tl.maximum,
        tl.where and tl.sum(tile, axis) are as in torch, tl.max(tile, axis) is torch.amax, and
        tl.dot is the product of two tiles.""")
    say("""The engine's kernel below loads parts of block tables (lesson 5) in the same way: a
        masked load of the blocks of one sequence.""")
    show_source(link("backends.gpu.kernels.attention._load_blocks.fn", "tl.load"))
    say("""Build it: `python -m lessons puzzle 1` shows the first puzzle. On the ladder the kernels
        of the CPU have a rung: `python -m lessons ladder 10`.""")


QUESTIONS = Questions("""
    A kernel adds 1,000 numbers, 128 in each program. How many places of the last program's tile
    must its mask leave out?
    Answer: 24. All tiles have the same size, so 8 programs have 1,024 places. The memory after the
    first 1,000 numbers belongs to something else.
    Hint: How many programs are there, and how many places do all of them have?
""")

IN_VLLM = """`reshape_and_cache_kernel_flash` in
`v1/attention/ops/triton_reshape_and_cache_flash.py` is a small kernel to read next: its programs
store keys and values in their slots."""
