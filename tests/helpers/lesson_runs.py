"""Runs a lesson as its page and as a terminal show it, and compares the page with docs/lessons."""

import contextlib
import io
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lesson_pages
import pytest

from lessons import show

SHOWN = ("say", "show_table", "show_source", "show_lines", "show_question")
DECIMAL = re.compile(r"(\d+\.\d+(?:e[+-]?\d+)?|\de[+-]\d+)")


class Both(lesson_pages.Page):
    """A page that also keeps what a terminal would show."""

    def __init__(self, stem: str) -> None:
        super().__init__(stem)
        self.printed = io.StringIO()

    def write(self, text: str) -> int:
        self.printed.write(text)
        return super().write(text)


def both(name: str) -> Callable[..., None]:
    on_page, on_terminal = getattr(lesson_pages.Page, name), getattr(show, name).__wrapped__

    def method(page: Both, *args: Any, **kwargs: Any) -> None:
        args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
        with contextlib.redirect_stdout(page.printed):
            on_terminal(*args, **kwargs)
        on_page(page, *args, **kwargs)

    return method


for name in SHOWN:
    setattr(Both, name, both(name))


def run_lesson(number: str) -> str:
    """Run a lesson -> what it prints. Its page must be up to date, except for what was measured."""
    page = Both(lesson_pages.STEMS[number])
    compare(lesson_pages.run(number, page), lesson_pages.files_of(page.stem))
    printed = page.printed.getvalue()
    assert max(map(len, printed.splitlines())) <= 100
    return printed


def row(printed: str, name: str) -> list[str]:
    """Return the cells of the one printed line that begins with `name`."""
    [line] = [line for line in printed.splitlines() if line.startswith(name + "  ")]
    return line.removeprefix(name).split()


def compare(new: Mapping[str, str], old: Mapping[str, str]) -> None:
    """Compare files: other machines round the last digits of decimal numbers in another way."""
    advice = "python .ci/lesson_pages.py writes the page again"
    assert sorted(new) == sorted(old), advice
    for name in new:
        masked = [
            "\n\n".join(map(lesson_pages.mask, lesson_pages.blocks(name, files[name])))
            for files in (new, old)
        ]
        words, expected = map(DECIMAL.split, masked)
        assert words[::2] == expected[::2], (name, advice)
        numbers, wanted = ([float(word) for word in parts[1::2]] for parts in (words, expected))
        assert numbers == pytest.approx(wanted, rel=0.01, abs=2e-3), (name, advice)
