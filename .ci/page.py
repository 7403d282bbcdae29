"""A page in Markdown of what a lesson shows."""

import contextlib
import inspect
import io
import linecache
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lessons import command, show

ROOT = Path(__file__).parents[1]
MODULES = command.LESSONS | {"ladder": "ladder"}  # that have pages
STEMS = {  # names of the pages
    name: re.sub("^(lesson|elective_)", "", module).replace("_", "-")
    for name, module in MODULES.items()
}
# Names of the code in a text: they are shown as code.
NAMES = re.compile(
    r'`[^`]+`|[A-Za-z_][\w.]*_\w+(?:\(\))?(?:=[\w."]+)?|\b\w+=(?:"\w+"|\d+)|\b[A-Z]\w+\.[a-z]\w+(?:\(\))?|\b\w+\(\)'
)


def first_page(lesson: str) -> str:
    return f"{STEMS[command.parts(lesson)[0]]}.md"


def markdown(text: str) -> str:
    """Return a paragraph of plain text in Markdown: names as code, links to papers and pages."""
    parts = re.split(rf"({NAMES.pattern})", " ".join(text.split()))
    for i, part in enumerate(parts):
        if i % 2:
            part = part.strip("`")
            parts[i] = f"[`{part}`]({STEMS[part]}.md)" if part in command.ELECTIVES else f"`{part}`"
            continue
        part = part.replace("<", "&lt;").replace("|", "\\|")
        part = re.sub(r"\*(?=\S)|(?<=\S)\*", r"\\*", part)
        part = re.sub(r"arXiv:([\d.]+\d)", r"[arXiv:\1](https://arxiv.org/abs/\1)", part)
        part = re.sub(r"docs/([\w-]+\.md)", r"[docs/\1](../\1)", part)
        parts[i] = re.sub(
            r"\b([Ll]esson) (\d+[a-d]?)(?! to)",
            lambda m: f"[{m[0]}]({first_page(m[2])})" if command.parts(m[2]) else m[0],
            part,
        )
    return "".join(parts)


def cell(value: object) -> str:
    """Return a cell of a table. Text in quotes and bars of signs are shown as code."""
    text = str(value).replace("|", "\\|")
    return f"`{text}`" if re.search(r"^[\['\"]|##|\.\.\.", text) else text.replace("<", "&lt;")


def row_of_link(path: str, number: int, name: str, code: str) -> str:
    """Return a row of a table: a link to a line of a file, the function, and the line."""
    place = f"[`{path.removeprefix('nanovllm/')}:{number}`](../../{path}#L{number})"
    return f"| {place} | `{name}` | `` {code} `` |"


class Page(io.StringIO):
    """Takes the place of sys.stdout while a lesson runs, and collects a page of what it shows.

    `show` calls the methods that have the names of its functions.
    """

    def __init__(self, stem: str) -> None:
        super().__init__()
        self.stem, self.parts = stem, list[str]()

    def add(self, *parts: str) -> None:
        """Add paragraphs. What was printed before comes first, as code."""
        if printed := self.getvalue().strip("\n"):
            self.truncate(self.seek(0))
            self.parts.append(f"```\n{printed}\n```")
        self.parts += parts

    def say(self, text: str) -> None:
        for paragraph in inspect.cleandoc(text).split("\n\n"):
            if paragraph.startswith(" "):  # a picture
                self.add(f"```\n{textwrap.dedent(paragraph)}\n```")
            else:
                self.add(markdown(paragraph))

    def show_table(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        self.add("\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines))

    def show_source(self, *links: str) -> None:
        place = "in the engine" if links[0].startswith("nanovllm/") else "in the source"
        rows = [f"| {place} | function | line |", "| --- | --- | --- |"]
        for link in links:
            place, _, name = link.partition("  ")
            path, _, number = place.partition(":")
            code = linecache.getline(str(ROOT / path), int(number)).strip().replace("|", "\\|")
            rows.append(row_of_link(path, int(number), name, code))
        self.add("\n".join(rows))

    def show_lines(self, function: Any, begin: str, end: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            show.show_lines(function, begin, end)
        link, _, code = printed.getvalue().partition("\n\n")
        self.show_source(link)
        self.add(f"```python\n{textwrap.dedent(code).strip()}\n```")

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
