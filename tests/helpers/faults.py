"""Runs an action and raises an error, or a signal, at one of the lines that it runs."""

import linecache
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import nanovllm

ROOT = str(Path(nanovllm.__file__).parent)
Line = tuple[str, int]  # a file below nanovllm/, and the number of a line


@cache
def all_exist(files: tuple[str, ...]) -> bool:
    return all(any(Path(ROOT).glob(f"{name}*")) for name in files)


@cache
def runs_in(name: str, files: tuple[str, ...]) -> bool:
    return name.startswith(ROOT) and name[len(ROOT) + 1 :].startswith(files)


@cache
def line_at(name: str, number: int) -> Line | None:
    """None where no fault can come: neither an error nor a signal comes where a block is left, and
    `try` and `yield` do nothing.
    """
    text = linecache.getline(name, number).strip()
    return None if text.startswith(("with", "try:", "yield")) else (name[len(ROOT) + 1 :], number)


def run(
    action: Callable[[], object], files: tuple[str, ...], at: int = -1, fault: Any = None
) -> list[Line]:
    """Run `action`, and call `fault` before the line number `at` of those that `files` run.

    `files` are those whose path below nanovllm/ begins like one of these. Returns their lines, in
    the order in which they ran, up to the fault. What the action raises is raised.
    """
    assert all_exist(files), files
    lines: list[Line] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        return trace_line if runs_in(frame.f_code.co_filename, files) else None

    def trace_line(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and (line := line_at(frame.f_code.co_filename, frame.f_lineno)):
            lines.append(line)
            if len(lines) - 1 == at:
                sys.settrace(before)  # what follows runs as fast as without it
                fault()
        return trace_line

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return lines


def each_line(lines: list[Line]) -> list[int]:
    """Return one place of each line: the first, a middle or the last one if it runs often."""
    places: dict[Line, list[int]] = {}
    for i, line in enumerate(lines):
        places.setdefault(line, []).append(i)
    return [
        found[(0, len(found) // 2, -1)[number % 3]] for number, found in enumerate(places.values())
    ]
