"""Formulas and pictures of lessons, which only a page draws (.ci/lesson_pages.py)."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from lessons.show import shown

# A part of a lane: where it starts, its length, its text, and the number of its color (0: gray).
Cell: TypeAlias = tuple[float, float, str, int]


@shown
def show_formula(plain: str, latex: str) -> None:
    """Print a formula as text. A page has it in LaTeX."""
    print(f"  {plain}\n")


@shown
def show_lanes(
    title: str, lanes: Sequence[tuple[str, Sequence[Cell]]], axis: str = "", **legend: int
) -> None:
    """Show lanes, each with a name and cells, on a page: a timeline, blocks, bars.

    `axis` is the unit of starts and lengths. Without it there is no axis.
    """


@shown
def show_plot(
    title: str,
    x: str,
    y: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    log: bool = False,
) -> None:
    """Show lines through points (x, y) on a page. A name that begins with "." has points only."""
