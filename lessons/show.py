"""Shows what lessons say: text, tables, links to the engine's source, and questions."""

import functools
import inspect
import os
import pkgutil
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lessons import score


class Question(NamedTuple):
    text: str  # a line, and a line for each choice, such as "(a) Because ..."
    answer: str  # a letter, short word or number; " or " joins two that are both right
    why: str
    hint: str  # is printed after a wrong answer


class Questions(list[Question]):
    """The questions of a lesson, read from a text. Blank lines separate them.

    Each has choices, which begin with "(a)", "(b)" and so on, or none; then "Answer: ", with the
    reason after a full stop, and "Hint: ".
    """

    def __init__(self, text: str) -> None:
        for part in inspect.cleandoc(text).split("\n\n"):
            text, _, rest = " ".join(part.split()).partition(" Answer: ")
            answer, _, rest = rest.partition(". ")
            why, _, hint = rest.partition(" Hint: ")
            self.append(Question(re.sub(r" (\([a-d]\) )", r"\n\1", text), answer, why, hint))

    def show(self, *numbers: int) -> None:
        """Show the questions with these numbers, counted from 1, without their answers."""
        for number in numbers:
            if tries := show_question(self, number):
                score.record("question", self[number - 1].text, tries)


def shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a page (.ci/page.py) in place of sys.stdout show it by its method of the same name."""

    @functools.wraps(function)
    def show(*args: Any, **kwargs: Any) -> Any:
        return getattr(sys.stdout, function.__name__, function)(*args, **kwargs)

    return show


def width() -> int:
    """Return the columns of the terminal, at most 100."""
    return max(40, min(100, shutil.get_terminal_size((100, 24)).columns))


def fill(text: str, first: str = "", rest: str = "") -> str:
    """Wrap a paragraph. Its lines begin with `first` and `rest`."""
    text = first + " ".join(text.split())
    return textwrap.fill(text, width(), subsequent_indent=rest, break_on_hyphens=False)


@shown
def say(text: str) -> None:
    """Print paragraphs, which blank lines separate, wrapped. An indented one is a picture."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        print(paragraph if paragraph.startswith(" ") else fill(paragraph), end="\n\n")


@shown
def show_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print columns, numbers to the right. If they are too wide, wrap each row."""
    cells = [[*head], *[[str(cell) for cell in row] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if sum(widths) + 2 * len(widths) - 2 > width():
        for row in cells[1:]:
            print(fill(", ".join(map(": ".join, zip(head, row, strict=True))), rest="    "))
    else:
        columns = []
        for i, column in enumerate(zip(*cells, strict=True)):
            is_number = i > 0 and any(re.match(r"-?\d", cell) for cell in column[1:])
            columns.append([f"{c:{'>' if is_number else '<'}{widths[i]}}" for c in column])
        for line in zip(*columns, strict=True):
            print("  ".join(line).rstrip())
    print()


def link(place: Any, text: str = "") -> str:
    """Return a link: the file, the line of a function that contains `text`, and its name.

    `place` is the function, or its name in the package, such as "models.sampler.sample". Raises
    ValueError if no line contains the text, so a link cannot become wrong unnoticed.
    """
    function = pkgutil.resolve_name(f"nanovllm.{place}") if isinstance(place, str) else place
    lines, start = inspect.getsourcelines(function)
    index = next((i for i, line in enumerate(lines) if text in line), None)
    if index is None:
        raise ValueError(f"no line of {function.__qualname__} contains {text!r}")
    # Of a decorated function, as above: `getsourcefile` alone returns the file of the decorator.
    file = inspect.getsourcefile(inspect.unwrap(function)) or ""
    path = os.path.relpath(file, Path(__file__).parents[1])
    return f"{path}:{start + index}  {function.__qualname__}"


@shown
def show_source(*links: str) -> None:
    in_engine = links[0].startswith("nanovllm/")
    print("In the engine:" if in_engine else "In the source:", *links, sep="\n  ", end="\n\n")


@shown
def show_lines(function: Any, begin: str, end: str) -> None:
    """Print the lines of `function` from the one that contains `begin` to the one with `end`."""
    lines, _ = inspect.getsourcelines(function)
    first = next(i for i, line in enumerate(lines) if begin in line)
    last = next(i for i, line in enumerate(lines) if i >= first and end in line)
    text = textwrap.dedent("".join(lines[first : last + 1]))
    print(link(function, begin), textwrap.indent(text, "    "), sep="\n\n")


def faster(before: float, after: float) -> str:
    """Return a phrase that compares two times in seconds, like "2.0 times as fast"."""
    ratio = before / after
    if 1 / 1.1 < ratio < 1.1:
        return "about as fast"  # other work of the machine changes a timing as much
    return f"{ratio:.1f} times as fast" if ratio > 1 else f"{1 / ratio:.1f} times as slow"


@shown
def show_question(questions: Sequence[Question], number: int) -> int:
    """Print question `number`, counted from 1. In a terminal, let the reader answer it twice.

    Returns the number of the try that was right, or 0.
    """
    print_question(question := questions[number - 1], number)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return 0
    last = question._replace(hint="The command at the end shows the answer.")
    tries = 0
    for label, this in (("Your answer", question), ("Once more", last)):
        try:
            given = input(f"  {label} (Enter skips it): ").strip()
        except EOFError:  # Ctrl-D, where no line ends
            given = ""
            print()
        tries += 1
        if given:
            print(fill(compare(this, given), "  ", "  "))
        if not given or is_right(question, given):
            break
    print()
    return tries if given and is_right(question, given) else 0


def print_question(question: Question, number: int) -> None:
    text, *choices = question.text.splitlines()
    print(fill(text, f"Question {number}: ", "  "))
    for choice in choices:
        print(fill(choice, "  ", "      "))
    print()


def is_right(question: Question, given: str) -> bool:
    """Compare an answer, except for case and commas in numbers.

    Its first word decides, as in "b, because ...", or its only number, as in "39 tokens".
    """
    text = given.lower().replace(",", "")
    first = re.match(r"\W*([a-z_]\w*)", text)
    numbers = [f"{float(number):g}" for number in re.findall(r"-?\d+(?:\.\d+)?", text)]
    right = question.answer.lower().split(" or ")
    return (first is not None and first[1] in right) or (len(numbers) == 1 and numbers[0] in right)


def compare(question: Question, given: str) -> str:
    """Return whether an answer is right, with the reason or the hint."""
    short = given.partition(", ")[0].rstrip(".")  # "b" of "b, because ..."
    if is_right(question, given):
        return f"{short} is right. {question.why}"
    return f"{short} is not right. Hint: {question.hint}"


def show_command(questions: Sequence[Question], command: str) -> None:
    """Print the commands that compare a reader's answers with the right ones, and show these."""
    yours = "".join(f" ANSWER{i + 1}" for i in range(len(questions)))
    print(f"To compare your answers:\n  {command}{yours}\nTo see the answers:\n  {command}")


def show_answers(questions: Sequence[Question], answers: list[str]) -> None:
    """Print questions with their answers, or whether each of `answers` is right.

    `answers` may stop after some questions. Raises ValueError if there are too many.
    """
    if len(answers) > len(questions):
        raise ValueError(f"there are {len(questions)} questions, and {len(answers)} answers")
    for i, question in enumerate(questions[: len(answers) or None]):
        print_question(question, i + 1)
        shown = compare(question, answers[i]) if answers else f"{question.answer}. {question.why}"
        print(fill(shown, "  ", "  "), end="\n\n")
