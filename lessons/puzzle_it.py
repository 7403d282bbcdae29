"""Puzzles: Triton kernels to complete, with checks, and what their programs load and store.

`python -m lessons puzzle N` writes the N-th to a file. Of the first two a line is missing, of the
next two the loop, and of the last everything.
"""

import inspect
import re
import textwrap
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lessons.build_it import run_checks
from lessons.lesson import optional
from lessons.show import fill

# The kernels of puzzles.py in their order, and what a wrong solution is told.
HINTS = {
    "add": "tl.store(pointers, values, mask=...): pointers and mask are as in the loads, from out. "
    "out[19:] is after the end and must keep its -1.",
    "softmax": "exp(score - c) has the same softmax for every c. Which c makes the largest exp 1?",
    "product": "The number in row r and column c of a matrix is at r * (numbers in a row) + c. In "
    "each turn k = start + tl.arange(0, SIZE) has columns of x and rows of y. Each turn adds to "
    "tile, and start is 0 in the first.",
    "online_softmax": "The sums contain exp(score - m), and should contain exp(score - new_m). The "
    "factor is their ratio. A masked score must be -inf, and a masked value 0.",
    "paged": "tl.load(tables + s * BLOCKS + b) is a physical block, and its slots begin at BLOCK "
    "times this number. There are tl.num_programs(1) query heads, and this // HEADS KV heads.",
}


def parts(kernels: ModuleType, name: str) -> list[str]:
    """Return the source of a kernel before, in and after the lines that are hidden."""
    return re.split(r" *# (?:puzzle|end)\n", inspect.getsource(getattr(kernels, name).fn))


def template(kernels: ModuleType, name: str, lines: str = "...  # your code") -> str:
    """Return a file with the kernel, with `lines` in the place of those that are hidden."""
    before, _, after = parts(kernels, name)
    head = "import triton\nimport triton.language as tl\n\n\n"
    return f"{head}{before}{textwrap.indent(lines.strip(), '    ')}\n{after}"


def compare(kernels: ModuleType, name: str, file: Path) -> str:
    """Run the kernel of a reader's file -> "" if the result is torch's, else the fault, a hint."""
    module = ModuleType(name)
    programs = dict[Any, list[str]]()
    fault = ""
    with warnings.catch_warnings(action="ignore"):  # NumPy warns of NaN in the interpreter
        try:
            exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
            got, want = kernels.launch(getattr(module, name), name, programs)
        except Exception as error:  # whatever a reader's code can raise
            cause = error.__cause__ or error
            message = str(cause).strip().rpartition("\n")[2].strip()
            fault = f"It raises {type(cause).__name__}: {message}."
        else:
            wrong = ~torch.isclose(got, want, rtol=1e-3, atol=1e-4)
            if wrong.any():
                place = tuple(wrong.nonzero()[0].tolist())
                fault = f"{int(wrong.sum())} of {wrong.numel()} numbers are wrong. The first is at "
                fault += f"{list(place)}: {got[place]:.4f} came out, not {want[place]:.4f}."
    return fault and f"That is not right. {fault}{picture(programs)}\n\nHint: {HINTS[name]}"


def describe(tensors: dict[str, Tensor], addresses: Any) -> str:
    """Return the part of a tensor that is at these addresses, such as "x[0:8]", or "nothing"."""
    for name, x in tensors.items():
        offsets = torch.tensor(addresses.astype("int64") - x.data_ptr()) // x.element_size()
        inside = offsets[(offsets >= 0) & (offsets < x.numel())]
        if len(inside):
            ends = [(i.min(), i.max() + 1) for i in torch.unravel_index(inside, x.shape)]
            sides = (f"{a}:{b}" if b - a > 1 else f"{a}" for a, b in ends)
            beyond = " and beyond" * (len(inside) < len(offsets))
            return f"{name}[{','.join(sides)}]{beyond}"
    return "memory of no tensor" if addresses.size else "nothing"


def picture(programs: dict[Any, list[str]]) -> str:
    """Return what the first and the last program load and store, or "" on a GPU."""
    lines = [" Its programs load and store (->), in this order:\n"] * bool(programs)
    for program in sorted(programs)[:: max(1, len(programs) - 1)]:
        name = f"    program {', '.join(map(str, program))}:  "
        lines.append(fill(", ".join(programs[program][:24]), name, " " * len(name)))
    return "\n".join(lines)


def run(
    which: str | None = None, answers: list[str] | None = None, check: str | None = None
) -> None:
    """List the puzzles, write one to a file, check a file, or show what is hidden."""
    kernels = optional("lessons.puzzles")
    numbers = {str(i): n for i, n in enumerate(HINTS, 1)}
    if kernels is None:
        raise ValueError("the puzzles need Triton, which exists for Linux only: pip install triton")
    if which is None:
        for number, name in numbers.items():
            print(
                f"puzzle {number}  {parts(kernels, name)[0].partition('# ')[2].partition(':')[0]}"
            )
    elif which not in numbers:
        raise ValueError(f"puzzle takes a number from 1 to {len(HINTS)}, not {which!r}")
    elif answers is not None:
        print(textwrap.dedent(parts(kernels, numbers[which])[1]).rstrip())
    elif check is not None:
        run_checks("puzzle", check, PUZZLE=which)
        print("That is right: the kernel computes what torch does.")
    else:
        write(kernels, numbers[which], which)


def write(kernels: ModuleType, name: str, number: str) -> None:
    """Print a puzzle, and write a file to complete, if there is none."""
    kernels.launch(getattr(kernels, name), name, programs := dict[Any, list[str]]())
    print(text := template(kernels, name))
    print(f"Puzzle {number}.{picture(programs)}\n")
    file = Path(f"{name}.py").resolve()
    if not file.exists():
        file.write_text(text)
    print(
        f"Complete it in {file} and check it:\n  python -m lessons puzzle {number} --check {file}"
    )
