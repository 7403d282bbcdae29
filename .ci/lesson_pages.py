"""Writes docs/lessons/, a page of each lesson, from what the lesson shows when it runs.

python .ci/lesson_pages.py             runs all lessons and writes their pages
python .ci/lesson_pages.py 3 12        runs lessons 3 and 12
python .ci/lesson_pages.py --lines     corrects the lines that the pages link to, and runs no lesson
python .ci/lesson_pages.py --measure   also replaces figures that differ in what was measured only

It also links the rows of docs/lessons.md to the pages. Without --measure a page keeps its figures
and their date, so a busy machine does not change them. Everything else comes from the run.
tests/lessons/test_lesson_pages.py compares the pages with the lessons.
"""

import argparse
import contextlib
import inspect
import io
import linecache
import logging
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import svg
import torch

from nanovllm.lessons import command, show
from nanovllm.tools.benchmarks import machine

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "lessons"
BUSY = 0.5  # processes that run on average: above it, others take part of the time
TITLES = {number: command.title(number).rstrip(".") for number in command.NUMBERS}
STEMS = {  # names of the pages
    number: name.removeprefix("lesson").replace("_", "-")
    for number, name in zip(command.NUMBERS, command.LESSONS, strict=True)
}
NAMES = re.compile(
    r'[A-Za-z_][\w.]*_\w+(?:\(\))?(?:=[\w."]+)?|\b\w+=(?:"\w+"|\d+)|\b[A-Z]\w+\.[a-z]\w+|\b\w+\(\)'
)
# A number of a sentence, column or picture that has one of these words is measured.
UNITS = re.compile(
    r"\b(ms|us|seconds?|GB/s|[GT]FLOPs/s|tokens/s|measured)\b|times as (?:fast|slow)|about as fast",
    re.I,
)
NUMBER = re.compile(r"[\w.]+ times as (?:fast|slow)|about as fast|\d[\d,.%:-]*\b%?")
LINK = re.compile(r"\[`(\S+):\d+`\]\((\S+)#L\d+\) \| `(.+?)` \| `` (.*) `` \|$", re.M)


def markdown(text: str) -> str:
    """Return a paragraph of plain text in Markdown: names as code, links to papers and pages."""
    parts = re.split(rf"({NAMES.pattern})", " ".join(text.split()))
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"`{part}`"
            continue
        part = part.replace("<", "&lt;").replace("|", "\\|")
        part = re.sub(r"\*(?=\S)|(?<=\S)\*", r"\\*", part)
        part = re.sub(r"arXiv:([\d.]+\d)", r"[arXiv:\1](https://arxiv.org/abs/\1)", part)
        part = re.sub(r"docs/(\w+\.md)", r"[docs/\1](../\1)", part)
        parts[i] = re.sub(
            r"\b([Ll]esson) (\d+)(?! to)",
            lambda m: f"[{m[0]}]({STEMS[m[2]]}.md)" if m[2] in STEMS else m[0],
            part,
        )
    return "".join(parts)


def cell(value: object) -> str:
    """Return a cell of a table. Text in quotes and bars of signs are shown as code."""
    text = str(value).replace("|", "\\|")
    return f"`{text}`" if re.search(r"^[\['\"]|##|\.\.\.", text) else text.replace("<", "&lt;")


class Page(io.StringIO):
    """Takes the place of sys.stdout while a lesson runs, and collects a page of what it shows.

    `show` calls the methods that have the names of its functions.
    """

    def __init__(self, stem: str) -> None:
        super().__init__()
        self.stem, self.parts, self.pictures = stem, list[str](), dict[str, str]()

    def add(self, *parts: str) -> None:
        """Add paragraphs. What was printed before comes first, as code."""
        if printed := self.getvalue().strip("\n"):
            self.truncate(self.seek(0))
            self.parts.append(f"```\n{printed}\n```")
        self.parts += parts

    def say(self, text: str) -> None:
        for paragraph in inspect.cleandoc(text).split("\n\n"):
            is_picture = paragraph.startswith(" ")
            code = f"```\n{textwrap.dedent(paragraph)}\n```"
            self.add(code if is_picture else markdown(paragraph))

    def show_table(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        self.add("\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines))

    def show_source(self, *links: str) -> None:
        rows = ["| in the engine | function | line |", "| --- | --- | --- |"]
        for link in links:
            place, _, name = link.partition("  ")
            path, _, number = place.partition(":")
            code = linecache.getline(str(ROOT / path), int(number)).strip().replace("|", "\\|")
            short = path.removeprefix("nanovllm/")
            rows.append(
                f"| [`{short}:{number}`](../../{path}#L{number}) | `{name}` | `` {code} `` |"
            )
        self.add("\n".join(rows))

    def show_lines(self, function: Any, begin: str, end: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            show.show_lines(function, begin, end)
        link, _, code = printed.getvalue().partition("\n\n")
        self.show_source(link)
        self.add(f"```python\n{textwrap.dedent(code).strip()}\n```")

    def show_formula(self, plain: str, latex: str) -> None:
        self.add(f"$$\n{latex}\n$$")

    def show_question(self, questions: Sequence[show.Question], number: int) -> None:
        question = questions[number - 1]
        text, *choices = map(markdown, question.text.splitlines())
        lines = [f"**Question {number}.** {text}", *choices]
        answer = f"**{markdown(question.answer)}**: {markdown(question.why)}"
        self.add(
            "\n".join(f"> {line}  " for line in lines).rstrip(),
            f"<details><summary>Answer to question {number}</summary>",
            answer,
            "</details>",
        )

    def show_lanes(self, title: str, lanes: Any, axis: str = "", **legend: int) -> None:
        names = {name.replace("_", " "): color for name, color in legend.items()}
        self.picture(title, svg.lanes(title, lanes, axis, names))

    def show_plot(self, title: str, x: str, y: str, lines: Any, log: bool = False) -> None:
        self.picture(title, svg.plot(title, x, y, lines, log))

    def picture(self, title: str, drawing: str) -> None:
        name = f"{self.stem}-{len(self.pictures) + 1}.svg"
        self.pictures[name] = drawing
        self.add(f"![{title}]({name})")

    def show_graph(self, mermaid: str) -> None:
        self.add(f"```mermaid\n{inspect.cleandoc(mermaid)}\n```")


def navigation(number: str) -> str:
    """Return links to the lessons before and after it, the list of all, and the source."""
    numbers = list(STEMS)
    i = numbers.index(number)
    before, after = numbers[:i][-1:], numbers[i + 1 :][:1]
    source = f"lesson{STEMS[number].replace('-', '_')}.py"
    links = [
        *(f"[← {TITLES[n]}]({STEMS[n]}.md)" for n in before),
        "[all lessons](../lessons.md)",
        f"[source](../../nanovllm/lessons/{source})",
        *(f"[{TITLES[n]} →]({STEMS[n]}.md)" for n in after),
    ]
    return " · ".join(links)


def run(number: str, page: Page) -> dict[str, str]:
    """Run a lesson while `page` takes the place of sys.stdout -> the names and texts of its files."""
    lesson, about = command.load(number), machine.describe(torch.device("cpu"))
    _, _, text = inspect.cleandoc(str(lesson.__doc__)).partition("\n")
    load = os.getloadavg()[0]
    with contextlib.redirect_stdout(page):
        page.say(text)
        command.run(lesson)
    page.add()
    busy = "" if load < BUSY else f", while {load:.0f} other processes ran"
    head = (
        "<!-- Written by .ci/lesson_pages.py: change the lesson and not this page. -->",
        f"# {TITLES[number]}",
        navigation(number),
        f"Figures: {about['CPU']}, {about['cores']} cores, {about['date'][:10]}{busy}. Run it: "
        f"`nanovllm lessons {number}`. Answer its questions: `nanovllm lessons {number} --answers`.",
    )
    parts = (*head, *page.parts, navigation(number))
    return {f"{page.stem}.md": "\n\n".join(parts) + "\n"} | page.pictures


def mask(block: str) -> str:
    """Return a block of a page, or a picture, with "#" for each number that was measured.

    Of a picture that shows what was measured only the title is left.
    """
    if block.startswith("Figures: "):
        return "Figures: #"
    if block.startswith("<svg") and UNITS.search(block):
        return block.partition("<title>")[2].partition("</title>")[0]
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


def correct_lines(text: str) -> str:
    """Return a page whose links lead to the lines that it shows, wherever they are now.

    Raises ValueError if such a line is no longer in the function.
    """

    def correct(link: re.Match[str]) -> str:
        short, target, name, code = link.groups()
        lines = (PAGES / target).read_text().splitlines()
        number = find_line(lines, name, code.replace("\\|", "|"))
        return f"[`{short}:{number}`]({target}#L{number}) | `{name}` | `` {code} `` |"

    return LINK.sub(correct, text)


def find_line(lines: Sequence[str], name: str, code: str) -> int:
    """Return the number of the first line of the function `name` that is `code`."""
    start, end = 0, len(lines)
    for part in name.split("."):
        pattern = re.compile(rf"( *)(?:async )?(?:def|class) {part}\b")
        start, indent = next(
            ((i, m[1]) for i in range(start, end) if (m := pattern.match(lines[i]))), (end, "")
        )
        inside = re.compile(rf"{indent} |\s*$|{indent}\)")
        end = next((i for i in range(start + 1, end) if not inside.match(lines[i])), end)
        while start and lines[start - 1].startswith(f"{indent}@"):
            start -= 1
    for i in range(start, end):
        if lines[i].strip() == code:
            return i + 1
    raise ValueError(f"{name} has no line {code!r} now: run the lesson again")


def files_of(stem: str) -> dict[str, str]:
    """Return the names and texts of the files that docs/lessons has for a lesson."""
    paths = [PAGES / f"{stem}.md", *PAGES.glob(f"{stem}-*.svg")]
    return {path.name: path.read_text() for path in paths if path.exists()}


def link_pages(index: str) -> str:
    """Return docs/lessons.md with a link to its page in the row of each lesson."""
    return re.sub(
        r"^\| \[?(\d+)(?:\]\(\S+\))? \| ",
        lambda row: f"| [{row[1]}](lessons/{STEMS[row[1]]}.md) | " if row[1] in STEMS else row[0],
        index,
        flags=re.MULTILINE,
    )


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
        if args.lines:
            files = {name: correct_lines(text) for name, text in old.items()}
        else:
            files = run(number, Page(stem))
            files = files if args.measure else keep_figures(files, old)
        for name in old.keys() - files.keys():
            (PAGES / name).unlink()
        for name, text in files.items():
            (PAGES / name).write_text(text)
        changed = sorted(name for name in files if files[name] != old.get(name))
        print(stem, *changed or ["is up to date"], file=sys.stderr, flush=True)
    index = PAGES.parent / "lessons.md"
    index.write_text(link_pages(index.read_text()))


if __name__ == "__main__":
    main()
