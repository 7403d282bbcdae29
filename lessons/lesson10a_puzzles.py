"""Lesson 10a: how a Triton kernel is written.

A GPU kernel is a function that many programs run at the same time, each for a part of the result.
In Triton (Tillet et al. 2019) a program works on tiles: arrays of a fixed size, which it loads from
pointers, computes with, and stores. Masks leave out what is not there.

    program      0         1         2        tl.program_id(0)
    numbers   [ 0 1 2 3 | 4 5 6 7 | 8 9 . . ]   program * 4 + tl.arange(0, 4)
    mask        1 1 1 1   1 1 1 1   1 1 0 0     numbers < 10

Without a GPU the same code runs in Triton's interpreter, one program after the other, if the
environment variable TRITON_INTERPRET is 1 when Triton is imported. The lessons set it themselves.
"""

import faulthandler
import inspect
import multiprocessing
import signal
import tempfile
import textwrap
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from lessons.lesson import optional
from lessons.show import Questions, link, say, show_source, show_table

MAX_SECONDS = 10  # of the processor, for a line
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
        "The line loads `b`, the tile of y with the rows k and the columns j.",
        """
                    x  k ->                y     j
               +----+----+----+            +----+----+----+----+
               |    |    |    |          k |    | b0 |    |    |
               +----+----+----+            +----+----+----+----+
             i | a0 | a1 | a2 |            |    | b1 |    |    |
               +----+----+----+            +----+----+----+----+
        tile (i, j) of out                 |    | b2 |    |    |
          = a0 b0 + a1 b1 + a2 b2          +----+----+----+----+""",
        "The number in row r and column c of a matrix is at r * (numbers in a row) + c. The line "
        "before loads the rows i and the columns k of x, which has `inner` numbers in a row.",
    ),
    Puzzle(
        "online_softmax",
        "online softmax: the scores arrive a tile at a time",
        "The line computes `factor`, by which the sums so far are multiplied when m becomes new_m.",
        """
        scores    [ 0 ... 7 | 8 ... 15 | 16 ... 19 . . . . ]   one program, three tiles
        m           2.4     ->  4.0    ->  4.0                 the largest so far
        total       sum     ->  sum * factor + sum of the tile""",
        "The sums contain exp(score - m), and should contain exp(score - new_m). Divide the "
        "second by the first.",
    ),
    Puzzle(
        "paged",
        "attention of one query over a block table",
        "The line computes `slot`, the slots of the positions, through the block table. Slots of "
        "other sequences contain NaN.",
        """
        position   [  0  1  2  3 |  4  5  6  7 |  8  9  .  . ]   tiles of one block
        table           5             2             7            physical blocks
        slot         20 21 22 23    8  9 10 11   28 29""",
        "tl.load(table + ...) loads physical blocks. Which logical block has a position? Lesson "
        "3 has the formula of a slot.",
    ),
)


def hidden_line(kernels: ModuleType, puzzle: Puzzle) -> tuple[list[str], int, str]:
    """Return the lines of a kernel, the index of the hidden line, and its indentation."""
    lines = inspect.getsource(getattr(kernels, puzzle.kernel).fn).splitlines()
    (index,) = (i for i, line in enumerate(lines) if line.endswith("# puzzle"))
    return lines, index, lines[index][: -len(lines[index].lstrip())]


def check(kernels: ModuleType, puzzle: Puzzle, line: str) -> str:
    """Run `compare` in a separate process, which a wrong pointer can end in the interpreter.

    A line that does not end is ended by a limit of CPU time, which does not depend on other
    programs. On a GPU a wrong pointer raises an error, and a forked process could not use the GPU.
    """
    if torch.cuda.is_available():
        return compare(kernels, puzzle, line)
    import resource  # exists where processes can be forked

    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def run() -> None:
        faulthandler.disable()  # the answer says what happened
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
        torch.set_num_threads(1)  # a forked process has no threads of its parent
        send.send(compare(kernels, puzzle, line))

    child = context.Process(target=run)
    child.start()
    send.close()
    try:
        said: str = receive.recv()
    except EOFError:
        child.join()
        if child.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"It does not end within {MAX_SECONDS} seconds."
        return f"It reads or writes where no memory is (signal {-(child.exitcode or 0)})."
    child.join()
    return said


def compare(kernels: ModuleType, puzzle: Puzzle, line: str) -> str:
    """Run the kernel with a reader's line. Returns "" if the result is as in torch, else the fault.

    The module is written to a file with that line, because Triton reads the source of a kernel.
    """
    lines, index, indent = hidden_line(kernels, puzzle)
    text = Path(str(kernels.__file__)).read_text()
    quiet = warnings.catch_warnings(action="ignore")  # NumPy warns of NaN in the interpreter
    with quiet, tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(text := text.replace(lines[index], indent + line.strip()))
        file.flush()
        module = ModuleType(puzzle.kernel)
        try:
            exec(compile(text, file.name, "exec"), module.__dict__)
            got, want = module.__dict__[f"check_{puzzle.kernel}"](module)
        except Exception as error:  # whatever a reader's line can raise
            cause = error.__cause__ or error
            message = (str(cause).splitlines() or [""])[-1].strip()
            return f"It raises {type(cause).__name__}: {message}."
    wrong = ~torch.isclose(got, want, rtol=1e-3, atol=1e-4)
    if not wrong.any():
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} numbers are wrong. The first is at {list(place)}: "
        f"{got[place]:.4f} came out, and torch computes {want[place]:.4f}."
    )


def run_puzzle(which: str | None, answers: list[str] | None) -> None:
    """List the puzzles, show one, or check a line for it. Without a line the answer is shown."""
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
    lines, index, indent = hidden_line(kernels, puzzle)
    if answers is None:
        say(f"Puzzle {which}: {puzzle.title}. {puzzle.task}")
        print(textwrap.indent(inspect.cleandoc(puzzle.picture), "    "), end="\n\n")
        lines[index] = f"{indent}...  # the missing line"
        print("\n".join(lines), end="\n\n")
        print(f"Check a line, in quotes:\n  {COMMAND} {which} --answers '...'")
    elif not answers:
        print(lines[index].strip().removesuffix("# puzzle").rstrip())
    elif wrong := check(kernels, puzzle, " ".join(answers)):
        say(f"That is not right. {wrong} Hint: {puzzle.hint}")
    else:
        say("That is right: the kernel computes what torch does.")


def show_kernel(kernels: Any) -> None:
    """Print the lines of a kernel, and the tile of each in two programs, computed by torch."""
    x, out = (kernels.place(torch.arange(10.0) * 10 * n) for n in (1, 0))
    kernels.double[(3,)](x, out, 10, 4)
    assert torch.equal(out, 2 * x)
    rows = [[line.strip()] for line in inspect.getsource(kernels.double.fn).splitlines()[2:]]
    for program in (1, 2):
        i = program * 4 + torch.arange(4)
        a = torch.where(i < 10, 10 * i, 0)
        tiles = (torch.tensor([program]), i, (i < 10).int(), a, 2 * a, torch.tensor([]))
        for row, tile in zip(rows, tiles, strict=True):
            row.append(" ".join(map(str, tile.tolist())))
    say("""A kernel, `@triton.jit def double(x, out, n, SIZE: tl.constexpr)`, which doubles the
        numbers 0, 10, ..., 90 in the three programs of the picture above: x and out are pointers to
        the first number, n is 10. SIZE is 4, a constant that is known when the kernel is compiled.
        Each line, and its tile in programs 1 and 2:""")
    show_table(("line", "in program 1", "in program 2"), rows)
    say("""x + i is a tile of pointers, one for each number. A masked load reads nothing and gives
        `other`, and a masked store writes nothing. The launch double[(3,)](x, out, 10, 4) starts
        three programs, and each knows its number.""")


def show_tile() -> None:
    """Print the offsets of one tile of a matrix, as in puzzle 3."""
    columns, i, j = 8, torch.arange(2, 4), torch.arange(4, 8)
    offsets = i[:, None] * columns + j[None, :]
    matrix = torch.arange(4 * columns).view(4, columns)
    assert torch.equal(matrix.flatten()[offsets], matrix[2:4, 4:8])
    say(f"""A tile of a matrix has two dimensions. The matrix below has 4 rows of {columns} numbers,
        each equal to its offset in memory. With i = [2, 3] and j = [4, 5, 6, 7] the expression i[:,
        None] * {columns} + j[None, :] gives the offsets of the tile in brackets:""")
    for row, line in enumerate(matrix.tolist()):
        cells = [f"[{n:2}]" if row in i and n % columns in j else f" {n:2} " for n in line]
        print("  " + "".join(cells))
    print()


def run() -> None:
    kernels = optional("lessons.puzzles")
    QUESTIONS.show(1)
    if kernels is None:
        say("Triton is not installed (it exists for Linux only), so no kernel runs here.")
        return
    show_kernel(kernels)
    show_tile()
    say(f"""Five kernels lead from a sum to the attention of lesson 10b. Each has about 20 lines,
        and the puzzles leave out one of them: `{COMMAND} 1` shows the first. tl.exp, tl.maximum,
        tl.where and tl.sum(tile, axis) are as in torch, tl.max(tile, axis) is torch.amax, and
        tl.dot is the product of two tiles.""")
    engine = optional("nanovllm.backends.gpu.kernels.attention")
    show_source(
        link(engine._load_blocks.fn, "tl.load"), link(engine._attend_tile.fn, "correction =")
    )


QUESTIONS = Questions("""
    A kernel adds 1,000 numbers, 128 in each of 8 programs. Why do its loads and stores need a mask?
    (a) All tiles have the same size, so the last one reaches beyond the 1,000 numbers.
    (b) Two programs would write the same numbers.
    (c) A load without a mask is slower.
    Answer: a. 8 programs have 1,024 numbers. The memory after the first 1,000 belongs to something
    else.
    Hint: Which numbers does the last program work on, and which of them exist?
""")
