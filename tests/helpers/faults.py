"""Runs an action and raises an error, or a signal, at one of the lines that it runs."""

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import nanovllm

ROOT = str(Path(nanovllm.__file__).parent)
Line = tuple[str, int]  # a file below nanovllm/, and the number of a line


def run(
    action: Callable[[], object], files: tuple[str, ...], at: int = -1, fault: Any = None
) -> list[Line]:
    """Run `action`, and call `fault` before the line number `at` of those that `files` run.

    `files` are those whose path below nanovllm/ begins like one of these. Returns their lines, in
    the order in which they ran. What the action raises is raised.
    """
    lines: list[Line] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(ROOT) or not name[len(ROOT) + 1 :].startswith(files):
            return None
        # Neither an error nor a signal comes where a block is left; `try` and `yield` do nothing.
        text = linecache.getline(name, frame.f_lineno).strip()
        if event == "line" and not text.startswith(("with", "try:", "yield")):
            lines.append((name[len(ROOT) + 1 :], frame.f_lineno))
            if len(lines) - 1 == at:
                fault()
        return trace

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
