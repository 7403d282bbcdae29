"""Checks a kernel: python -m lessons puzzle NUMBER --check FILE"""

import os
from pathlib import Path

from build_check import expect

from lessons import puzzle_it, puzzles


def test_kernel() -> None:
    name = [*puzzle_it.HINTS][int(os.environ["PUZZLE"]) - 1]
    fault = puzzle_it.compare(puzzles, name, Path(os.environ["SOLUTION"]))
    expect(not fault, fault)
