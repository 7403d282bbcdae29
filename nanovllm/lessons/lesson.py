"""What the lessons share: printing, links to the engine's source, timing, and questions."""

import inspect
import os
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nanovllm import LLM

T = TypeVar("T")
WIDTH = 100


class Question(NamedTuple):
    """A question at the end of a lesson. The lesson computes its answer with the engine."""

    text: str
    answer: str  # one short word or number, so that a reader's answer can be compared with it
    why: str


def say(text: str) -> None:
    """Print paragraphs, which blank lines separate, wrapped."""
    for paragraph in textwrap.dedent(text).strip().split("\n\n"):
        print(textwrap.fill(" ".join(paragraph.split()), WIDTH), end="\n\n")


def show_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print aligned columns: the first to the left, the others to the right."""
    cells = [head, *[[str(cell) for cell in row] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *rest in cells:
        columns = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *columns]).rstrip())
    print()


def link(function: Any, text: str = "") -> str:
    """Where the engine does it: the file, the line of `function` that contains `text`, its name.

    Raises ValueError if no line contains it, so that links do not outlive what they point to.
    """
    lines, start = inspect.getsourcelines(function)
    at = next((i for i, line in enumerate(lines) if text in line), None)
    if at is None:
        raise ValueError(f"no line of {function.__qualname__} contains {text!r}")
    path = os.path.relpath(inspect.getsourcefile(function) or "", Path(__file__).parents[2])
    return f"{path}:{start + at}  {function.__qualname__}"


def show_source(*links: str) -> None:
    print("In the engine, the line and the function that it is in:", *links, sep="\n  ", end="\n\n")


def timed(function: Callable[[], T], repeats: int = 3) -> tuple[T, float]:
    """Call it `repeats` times. Returns the last result and the median of the seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def make_llm(**options: Any) -> LLM:
    """The embedded model in float32, in which near-ties do not change tokens, on the CPU."""
    return LLM(**({"dtype": "float32", "device": "cpu"} | options))


def show_questions(questions: list[Question], command: str) -> None:
    """Print questions without their answers. `command` shows these."""
    print("Questions:\n")
    for i, question in enumerate(questions, 1):
        print(textwrap.fill(f"{i}. {question.text}", WIDTH, subsequent_indent="   "))
    yours = " ".join("..." for _ in questions)
    print(f"\nCompare your answers, or see them without yours:\n  {command} {yours}")


def show_answers(questions: list[Question], answers: list[str]) -> None:
    """Print questions with their answers, or whether each of `answers` is right.

    Raises ValueError for a wrong number of answers.
    """
    if answers and len(answers) != len(questions):
        raise ValueError(f"{len(questions)} answers are needed, one a question, not {len(answers)}")
    for i, question in enumerate(questions):
        print(textwrap.fill(f"{i + 1}. {question.text}", WIDTH, subsequent_indent="   "))
        if not answers:
            line = f"{question.answer}. {question.why}"
        elif answers[i].strip().removesuffix("()").lower() == question.answer.lower():
            line = f"{answers[i]} is right. {question.why}"
        else:
            line = f"{answers[i]} is not right."
        print(textwrap.fill(line, WIDTH, initial_indent="   ", subsequent_indent="   "), end="\n\n")
