"""Writes docs/lessons/, a page of each lesson, from what the lesson shows when it runs.

PYTHONPATH=. python .ci/lesson_pages.py             runs all lessons and writes their pages
PYTHONPATH=. python .ci/lesson_pages.py 5 11b       runs lesson 5 and the second part of lesson 11
PYTHONPATH=. python .ci/lesson_pages.py --lines     corrects links to lines and other pages, and runs no lesson
PYTHONPATH=. python .ci/lesson_pages.py --measure   runs each lesson three times, and writes measured figures as ranges

Without --measure a page keeps its figures and their date, so a busy machine does not change them.
Everything else comes from the run. Figures that were measured while other processes took more than
10 % of the CPU time are not written. tests/lessons/test_lesson_pages.py compares the pages with the
lessons.
"""

import argparse
import ast
import contextlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence

import torch
from page import MODULES, ROOT, STEMS, Page, row_of_link

from lessons import command
from tools.benchmarks import machine

PAGES = ROOT / "docs" / "lessons"
TITLES = {name: command.title(name).rstrip(".") for name in MODULES}
# A number of a sentence, column or picture that has one of these words is measured.
UNITS = re.compile(
    r"\b(ms|us|seconds|per second|GB/s|[GT]FLOPs/s|tokens/s|requests/s|goodput|measured)\b|times as (?:fast|slow)|about as fast",
    re.I,
)
NUMBER = re.compile(r"[\w.]+ times as (?:fast|slow)|about as fast|\d[\d,.%:-]*\b%?(?: \(noisy\))?")
RANGE = re.compile(rf"({NUMBER.pattern}) to ({NUMBER.pattern})")  # as `combine` writes it
LINK = re.compile(r"^\| \[`\S+`\]\(\.\./\.\./(\S+)#L\d+\) \| `(.+?)` \| `` (.*) `` \|$", re.M)


def navigation(number: str) -> str:
    """Return links to the lessons before and after it, the list of all, and the source."""
    names = list(MODULES)
    i = names.index(number)
    links = ["[all lessons](../lessons.md)"]
    links.append(f"[source](../../lessons/{MODULES[number]}.py)")
    for before in names[:i][-1:]:
        links.insert(0, f"[← {TITLES[before]}]({STEMS[before]}.md)")
    for after in names[i + 1 :][:1]:
        links.append(f"[{TITLES[after]} →]({STEMS[after]}.md)")
    return " · ".join(links)


def head(number: str) -> list[str]:
    """Return the first blocks of a page."""
    return [
        "<!-- Written by .ci/lesson_pages.py: change the lesson and not this page. -->",
        f"# {TITLES[number]}",
        navigation(number),
        f"Run it: `python -m lessons {number}`."
        + " It asks the questions of this page, and waits for your answers." * (number != "ladder"),
    ]


def run(number: str, page: Page) -> dict[str, str]:
    """Run a lesson while `page` takes the place of sys.stdout -> the names and texts of its files."""
    lesson, about = command.load(number), machine.describe(torch.device("cpu"))
    _, _, text = inspect.cleandoc(str(lesson.__doc__)).partition("\n")
    since = machine.cpu_seconds()
    with contextlib.redirect_stdout(page):
        page.say(text)
        lesson.run()
        if number in command.LESSONS:
            page.say(command.in_vllm(lesson))
    page.add()
    others = machine.describe_load(machine.other_load(since))
    parts = [*head(number), *page.parts]
    if getattr(lesson, "SHOWS_TIMES", False):
        parts.append(
            f"Figures: {about['CPU']}, {about['cores']} cores, {about['date'][:10]}. Other "
            f"processes took {others} of the CPU time."
        )
    parts.append(navigation(number))
    return {f"{page.stem}.md": "\n\n".join(parts) + "\n"}


def mask(block: str) -> str:
    """Return a block of a page with "#" for each number that was measured."""
    if block.startswith("Figures: "):
        return "Figures: #"
    block = RANGE.sub(r"\2", block) if UNITS.search(block) else block
    if not block.startswith("|"):
        return NUMBER.sub("#", block) if UNITS.search(block) else block
    head, *rows = (line.split(" | ") for line in block.splitlines())
    measured = [bool(UNITS.search(name)) for name in head]
    return "\n".join(
        " | ".join(
            NUMBER.sub("#", cell) if in_unit or UNITS.search(cell) else cell
            for in_unit, cell in zip(measured, row, strict=True)
        )
        for row in (head, *rows)
    )


def blocks(name: str, text: str) -> list[str]:
    return text.strip().split("\n\n") if name.endswith(".md") else [text]


def keep_figures(new: Mapping[str, str], old: Mapping[str, str]) -> dict[str, str]:
    """Return new files with the old figures, if only measured figures differ where there are any."""
    known = {mask(block): block for name in old for block in blocks(name, old[name])}
    masks = {block: mask(block) for name in new for block in blocks(name, new[name])}
    if not all(masked in known for block, masked in masks.items() if masked != block):
        return dict(new)
    kept = {
        name: "\n\n".join(known.get(masks[block], block) for block in blocks(name, text))
        for name, text in new.items()
    }
    return {name: text.rstrip("\n") + "\n" for name, text in kept.items()}


def combine(runs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the files of one lesson, with ranges where the figures of its runs differ.

    Pictures are those of the first run.
    """
    files = dict(runs[0])
    for name in files:
        if name.endswith(".md"):
            same = zip(*(blocks(name, run[name]) for run in runs), strict=True)
            files[name] = "\n\n".join(map(combine_blocks, same)) + "\n"
    return files


def combine_blocks(versions: Sequence[str]) -> str:
    if versions[0].startswith("Figures: "):
        times = f" Measured {len(versions)} times; ranges are from the smallest to the largest."
        return versions[0] + times * (len(versions) > 1)
    texts, numbers = NUMBER.split(versions[0]), [*map(NUMBER.findall, versions)]
    values = [range_of(found) for found in zip(*numbers, strict=True)]
    return "".join(part for pair in zip(texts, [*values, ""], strict=True) for part in pair)


def range_of(values: Sequence[str]) -> str:
    """Return "1.2 to 1.5 times as fast" of "1.2 times as fast" and "1.5 times as fast"."""
    if len(set(values)) == 1:
        return values[0]
    numbers = [value.replace("about as fast", "1.0 times as fast") for value in values]
    by_size = sorted(numbers, key=lambda number: float(re.sub(r"[^\d.]", "", number)))
    low, high = by_size[0], by_size[-1]
    return f"{low.removesuffix(high.lstrip('0123456789.,'))} to {high}"


def measured(files: Mapping[str, str]) -> set[str]:
    """Return the blocks that contain measured figures."""
    every = {block for name in files for block in blocks(name, files[name])}
    return {block for block in every if mask(block) not in (block, "Figures: #")}


def correct_lines(text: str) -> str:
    """Return a page whose links lead to the lines that it shows, wherever they are now.

    Raises ValueError if such a line is no longer in the function.
    """

    def correct(link: re.Match[str]) -> str:
        path, name, code = link.groups()
        source = (ROOT / path).read_text()
        return row_of_link(path, find_line(source, name, code.replace("\\|", "|")), name, code)

    return LINK.sub(correct, text)


def find_line(source: str, name: str, code: str) -> int:
    """Return the number of the first line of the function `name` that is `code`."""
    node: ast.AST = ast.parse(source)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for part in name.split("."):
        inside = (n for n in ast.walk(node) if isinstance(n, kinds) and n.name == part)
        node = next(inside, ast.Module([], []))
    starts = [n.lineno for n in ast.walk(node) if hasattr(n, "lineno")]  # also of decorators
    lines = source.splitlines()
    for number in range(min(starts, default=1), getattr(node, "end_lineno", 0) + 1):
        if lines[number - 1].strip() == code:
            return number
    raise ValueError(f"{name} has no line {code!r} now: run the lesson again")


def files_of(stem: str) -> dict[str, str]:
    """Return the names and texts of the files that docs/lessons has for a lesson."""
    path = PAGES / f"{stem}.md"
    return {path.name: path.read_text()} if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", metavar="N")
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--measure", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.numbers) - set(STEMS):
        parser.error(f"no lesson {', '.join(sorted(unknown))}")
    logging.getLogger("nanovllm").setLevel(logging.WARNING)
    os.environ["COLUMNS"] = "100"
    PAGES.mkdir(exist_ok=True)
    for number in args.numbers or STEMS:
        stem = STEMS[number]
        old = files_of(stem)
        if args.lines and not old:
            parser.error(f"lesson {number} has no page: run it without --lines")
        if args.lines:
            files = {name: correct_lines(text) for name, text in old.items()}
            parts = [*head(number), *files[f"{stem}.md"].split("\n\n")[4:-1], navigation(number)]
            files[f"{stem}.md"] = "\n\n".join(parts) + "\n"
        else:
            since = machine.cpu_seconds()
            files = combine([run(number, Page(stem)) for _ in range(3 if args.measure else 1)])
            load = machine.other_load(since)
            files = files if args.measure else keep_figures(files, old)
            if load > command.BUSY and not measured(files) <= measured(old):
                parser.error(
                    f"lesson {number} has new figures, which were measured while other processes "
                    f"took {load:.0%} of the CPU time: run it again when they have ended"
                )
        for name in old.keys() - files.keys():
            (PAGES / name).unlink()
        for name, text in files.items():
            (PAGES / name).write_text(text)
        changed = sorted(name for name in files if files[name] != old.get(name))
        print(stem, *changed or ["is up to date"], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
