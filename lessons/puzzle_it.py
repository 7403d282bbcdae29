"""Puzzles: Triton kernels to complete, with checks, and what their programs load and store.

`python -m lessons puzzle N` shows the N-th. Of the first two a line is missing, of the next two the
loop, and of the last everything.
"""

import inspect
import re
import tempfile
import textwrap
import warnings
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from lessons.build_it import run_checks
from lessons.lesson import optional
from lessons.show import say

COMMAND = "python -m lessons puzzle"


class Puzzle(NamedTuple):
    kernel: str  # a function of puzzles.py; its check is `check_` and this name
    title: str
    task: str
    picture: str  # of its tiles
    hint: str


PUZZLES = (
    Puzzle(
        "add",
        "vector add: out = x + y",
        "The line stores the sums. 19 numbers are added by 3 programs of 8. The check adds 6 "
        "numbers too, and what follows the sums in memory, -1 in the check, must not change.",
        """
        program      0                 1                      2
        numbers   [  0  1 ...  7  |  8  9 ... 15  | 16 17 18  .  .  .  .  . ]
        mask         1  1 ...  1     1  1 ...  1     1  1  1  0  0  0  0  0""",
        "tl.store(pointers, values, mask=...): pointers and mask are as in the loads, from `out`.",
    ),
    Puzzle(
        "softmax",
        "softmax of each row of a matrix",
        "The line computes `weights`, which the next line divides by their sum. The numbers of one "
        "row are near 1,000, of another near -1,000: exp of them is infinite, or 0, in float32.",
        """
        program 0   row 0   [ x x x x x . . . ]   a tile of 8 for a row of 5 numbers
        program 1   row 1   [ x x x x x . . . ]   .: masked, the score is -inf
        program 2   row 2   [ x x x x x . . . ]""",
        "exp(score - c) has the same softmax for every c. With which c is the largest exp 1?",
    ),
    Puzzle(
        "product",
        "product of two matrices, tile by tile",
        "The loop adds the products of the tiles of x and y to `tile`. tl.dot(a, b, "
        'input_precision="ieee") is the product of two tiles.',
        """
                    x  k ->                y     j
               +----+----+----+            +----+----+----+----+
               |    |    |    |          k |    | b0 |    |    |
               +----+----+----+            +----+----+----+----+
             i | a0 | a1 | a2 |            |    | b1 |    |    |
               +----+----+----+            +----+----+----+----+
        tile (i, j) of out                 |    | b2 |    |    |
          = a0 b0 + a1 b1 + a2 b2          +----+----+----+----+""",
        "The number in row r and column c of a matrix is at r * (numbers in a row) + c. In each "
        "turn k = start + tl.arange(0, SIZE) has the columns of x, which has `inner` numbers in a "
        "row, and the rows of y, which has `columns`.",
    ),
    Puzzle(
        "online_softmax",
        "online softmax: the scores arrive a tile at a time",
        "The loop takes SIZE scores and their values at a time, and updates m, total and acc. When "
        "m rises, the sums so far are multiplied by a factor.",
        """
        scores    [ 0 ... 7 | 8 ... 15 | 16 ... 19 . . . . ]   one program, three tiles
        m           2.4     ->  4.0    ->  4.0                 the largest so far
        total       sum     ->  sum * factor + sum of the tile""",
        "The sums contain exp(score - m), and should contain exp(score - new_m): the factor is the "
        "second divided by the first. A masked score must be -inf, and a masked value 0.",
    ),
    Puzzle(
        "paged",
        "the whole kernel: attention over block tables, for several sequences and heads",
        "Write all of it, with the loop of puzzle 4. The check has 2 sequences, of 10 and 8 "
        "positions, 4 query heads and 2 KV heads.",
        """
        sequence 0   position    [  0  1  2  3 |  4  5  6  7 |  8  9  .  . ]   tiles of one block
                     tables[0]         5             2             7           physical blocks
                     slot          20 21 22 23    8  9 10 11   28 29
        query head   0  1  2  3
        KV head      0  0  1  1""",
        "tl.load(tables + s * BLOCKS + b) is a physical block, whose slots begin at this number "
        "times BLOCK. There are tl.num_programs(1) query heads, and this number // HEADS KV heads.",
    ),
)


def parts(kernels: ModuleType, puzzle: Puzzle) -> list[str]:
    """Return the source of a kernel before, in and after the lines that are hidden."""
    source = inspect.getsource(getattr(kernels, puzzle.kernel).fn)
    return re.split(r" *# (?:puzzle|end)\n", source)


def template(kernels: ModuleType, puzzle: Puzzle, lines: str = "...  # your code") -> str:
    """Return a file with the kernel, with `lines` in the place of those that are hidden."""
    before, _, after = parts(kernels, puzzle)
    head = "import triton\nimport triton.language as tl\n\n\n"
    return f"{head}{before}{textwrap.indent(lines.strip(), '    ')}\n{after}"


def compare(kernels: ModuleType, puzzle: Puzzle, file: Path) -> str:
    """Run the kernel of a reader's file -> "" if the result is torch's, else the fault, a hint."""
    module, name = ModuleType(puzzle.kernel), puzzle.kernel
    observed, fault = None, ""
    with warnings.catch_warnings(action="ignore"):  # NumPy warns of NaN in the interpreter
        try:
            exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
            observed = kernels.Observed(getattr(module, name))
            got, want = getattr(kernels, f"check_{name}")(observed)
        except Exception as error:  # whatever a reader's code can raise
            cause = error.__cause__ or error
            message = (str(cause).splitlines() or [""])[-1].strip()
            fault = f"It raises {type(cause).__name__}: {message}."
        else:
            wrong = ~torch.isclose(got, want, rtol=1e-3, atol=1e-4)
            if wrong.any():
                place = tuple(wrong.nonzero()[0].tolist())
                fault = f"{int(wrong.sum())} of {wrong.numel()} numbers are wrong. The first is at "
                fault += f"{list(place)}: {got[place]:.4f} came out, not {want[place]:.4f}."
    if fault and observed and observed.programs:
        fault += f" Its programs load and store (->), in this order:\n\n{observed.picture()}"
    return fault and f"That is not right. {fault}\n\nHint: {puzzle.hint}"


def run(
    which: str | None = None, answers: list[str] | None = None, check: str | None = None
) -> None:
    """List the puzzles, show one, or check a line or a file. Without a line the answer is shown."""
    kernels = optional("lessons.puzzles")
    if kernels is None:
        raise ValueError("the puzzles need Triton, which exists for Linux only: pip install triton")
    numbers = [str(i) for i in range(1, len(PUZZLES) + 1)]
    if which is None:
        print(*(f"puzzle {i}  {p.title}" for i, p in zip(numbers, PUZZLES, strict=True)), sep="\n")
        return
    if which not in numbers:
        raise ValueError(f"puzzle takes a number from 1 to {len(PUZZLES)}, not {which!r}")
    puzzle = PUZZLES[int(which) - 1]
    if check is None and answers is None:
        show_puzzle(kernels, puzzle, which)
        return
    if check is None and not answers:
        print(textwrap.dedent(parts(kernels, puzzle)[1]).rstrip())
        return
    with tempfile.NamedTemporaryFile("w", suffix=".py") as text:  # Triton reads source from a file
        text.write(template(kernels, puzzle, " ".join(answers or ())))
        text.flush()
        run_checks("puzzle", check or text.name, PUZZLE=which)
    print("That is right: the kernel computes what torch does.")


def show_puzzle(kernels: ModuleType, puzzle: Puzzle, number: str) -> None:
    """Print a puzzle. If more than a line is hidden, write a file to complete, if there is none."""
    say(f"Puzzle {number}: {puzzle.title}. {puzzle.task}")
    print(textwrap.indent(inspect.cleandoc(puzzle.picture), "    "), end="\n\n")
    observed = kernels.Observed(getattr(kernels, puzzle.kernel))
    getattr(kernels, f"check_{puzzle.kernel}")(observed)
    if observed.programs:
        print(f"Its programs load and store (->), in this order:\n\n{observed.picture()}\n")
    print(text := template(kernels, puzzle))
    if parts(kernels, puzzle)[1].count("\n") == 1:
        print(f"Check a line, in quotes:\n  {COMMAND} {number} --answers '...'")
        return
    file = Path(f"{puzzle.kernel}.py").resolve()
    if not file.exists():
        file.write_text(text)
    print(f"Complete it in {file} and check it:\n  {COMMAND} {number} --check {file}")
