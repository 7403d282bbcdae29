"""Formulas and pictures of lessons, which only a page draws (.ci/page.py)."""

from collections.abc import Sequence
from typing import Any

from lessons.show import shown

# A name, and its cells: where each starts, its length, text and number of its color (0: gray).
Lane = tuple[str, Sequence[tuple[float, float, str, int]]]


@shown
def show_formula(plain: str, latex: str) -> None:
    """Print a formula as text. A page has it in LaTeX."""
    print(f"  {plain}\n")


@shown
def show_lanes(title: str, lanes: Sequence[Lane], axis: str = "", **legend: int) -> None:
    """Show a timeline, blocks or bars. `axis` is the unit of starts and lengths, if it is shown."""


@shown
def show_plot(title: str, x: str, y: str, lines: Any) -> None:
    """Show lines: the name of each, and its points (x, y)."""
