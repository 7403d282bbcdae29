"""docs/lessons says what the lessons say, and its links lead to the lines that it shows.

Tests that run a lesson compare its whole page, except for what was measured (`run_lesson`).
"""

import ast
import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lesson_pages import (
    MODULES,
    PAGES,
    STEMS,
    combine,
    correct_lines,
    files_of,
    find_line,
    keep_figures,
    mask,
    measured,
)
from lesson_runs import compare

from lessons import command
from lessons.show import Questions
from nanovllm.models.layers import Linear

LESSONS = Path(command.__file__).parent
# What a lesson says only without an optional package.
SELDOM = (re.escape("not installed"),)
TABLE = "| step | ms | tokens |\n| --- | ---: | ---: |\n| a | {} | {} |"


def page(number: str) -> str:
    return files_of(STEMS[number])[f"{STEMS[number]}.md"]


def plain(text: str) -> str:
    """Return Markdown without its signs."""
    text = re.sub(r"\[([^\]]+)\]\([^)\s]+\)", r"\1", text)
    return " ".join(re.sub(r"[`\\]", "", text).replace("&lt;", "<").split())


def template(node: ast.expr) -> str:
    """Return the text of a string, with a NUL for each value that an f-string inserts."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    return node.value if isinstance(node, ast.Constant) else "\0"


def pattern(text: str) -> str:
    return ".*?".join(re.escape(plain(part)) for part in text.split("\0"))


def said(number: str) -> list[str]:
    """Return patterns of all paragraphs that the run of a lesson may show, from its source."""
    tree = ast.parse((LESSONS / f"{MODULES[number]}.py").read_text())
    texts = [(ast.get_docstring(tree) or "").partition("\n")[2]]
    unseen = {node.name: node for node in tree.body if hasattr(node, "name")}
    reached = [unseen.pop("run")]
    for function in reached:  # what it calls is appended
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in unseen:
                reached.append(unseen.pop(node.id))
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "say":
                texts.append(template(node.args[0]))
    if number in command.LESSONS:
        texts.append(command.in_vllm(command.load(number)))
    paragraphs = [part for text in texts for part in inspect.cleandoc(text).split("\n\n")]
    return [pattern(part) for part in paragraphs if not part.startswith(" ")]


def paragraphs(number: str) -> list[str]:
    """Return the paragraphs of a page that are neither code, tables, pictures nor navigation."""
    text = re.sub(r"```.*?```|<details>.*?</details>", "", page(number), flags=re.DOTALL)
    found = [part for part in text.strip().split("\n\n")[4:-1] if part.strip()]
    return [plain(part) for part in found if not re.match(r"\s*(\||>|!\[|Figures: )", part)]


@pytest.mark.parametrize("number", STEMS)
def test_a_page_says_what_its_lesson_says(number: str) -> None:
    patterns, on_page = said(number), paragraphs(number)
    assert len(on_page) > 3
    for part in on_page:
        assert any(re.fullmatch(pattern, part) for pattern in patterns), part
    for each in patterns:
        found = any(re.fullmatch(each, part) for part in on_page)
        assert found or any(words in each for words in SELDOM), each


@pytest.mark.parametrize("number", command.LESSONS)
def test_a_page_ends_with_what_vllm_does(number: str) -> None:
    assert paragraphs(number)[-1] == plain(command.in_vllm(command.load(number)))
    assert re.search(r"`\S+\.py`", command.load(number).IN_VLLM)


@pytest.mark.parametrize("number", STEMS)
def test_a_page_has_its_questions_before_the_answers(number: str) -> None:
    questions = getattr(command.load(number), "QUESTIONS", ())
    text = plain(page(number))
    for i, question in enumerate(questions, 1):
        asked = text.index(f"**Question {i}.** ")
        for line in question.text.splitlines():
            assert plain(line) in text[asked:], line
        answer = plain(f"**{question.answer}**: {question.why}")
        assert answer in text[asked:]
        assert text.count(f"**Question {i}.** ") == 1


@pytest.mark.parametrize("number", STEMS)
def test_links_lead_to_the_lines_that_the_page_shows(number: str) -> None:
    assert correct_lines(page(number)) == page(number)
    assert "#L" in page(number)
    for link in re.findall(r"\]\((\S+?)\)", page(number)):
        assert link.startswith("http") or (PAGES / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("number", STEMS)
def test_a_lesson_that_shows_times_says_so(number: str) -> None:
    """Its page names the machine, and its command says if the machine is busy."""
    assert ("\n\nFigures: " in page(number)) == command.shows_times(number, {})
    assert not command.shows_times(number, {"answers": []})


def test_the_index_has_all_pages_and_there_are_no_others() -> None:
    index = (PAGES.parent / "lessons.md").read_text()
    assert all(f"| [{n}](lessons/{stem}.md) | " in index for n, stem in STEMS.items())
    assert sorted(path.stem for path in PAGES.glob("*.md")) == sorted(STEMS.values())


def test_a_line_is_found_where_it_has_moved() -> None:
    source = Path(inspect.getsourcefile(Linear) or "").read_text()
    lines, start = inspect.getsourcelines(Linear.__call__)
    code = lines[-1].strip()
    assert find_line(source, "Linear.__call__", code) == start + len(lines) - 1
    assert find_line("\n\n" + source, "Linear.__call__", code) == start + len(lines) + 1
    for name in ("Linear.__call__", "Linear.is_gone"):
        with pytest.raises(ValueError, match=f"{name} has no line 'is gone' now"):
            find_line(source, name, "is gone")


def test_figures_are_kept_if_nothing_else_has_changed() -> None:
    old = {"1.md": "Figures: one CPU, 2026-01-01.\n\nIt takes 7 ms.\n\n" + TABLE.format(1, 5)}
    new = {"1.md": "Figures: a CPU, 2026-02-02.\n\nIt takes 9 ms.\n\n" + TABLE.format(2, 5)}
    assert keep_figures(new, old)["1.md"].strip() == old["1.md"]
    for other in (
        "3 tokens take 9 ms",
        "It takes 9 ms.",
    ):  # a text, or a column that is not measured
        changed = {"1.md": new["1.md"].replace("It takes 9 ms", other).replace("| 5 |", "| 6 |")}
        assert keep_figures(changed, old) == changed
    with_text = {"1.md": new["1.md"] + "\n\nA new text."}
    assert keep_figures(with_text, old)["1.md"].strip() == old["1.md"] + "\n\nA new text."
    assert measured(keep_figures(with_text, old)) == measured(old)
    assert measured(new) == {"It takes 9 ms.", TABLE.format(2, 5).strip()} != measured(old)


def test_figures_of_several_runs_are_ranges() -> None:
    runs = [
        {"1.md": f"It takes {a} ms, {b}.\n\n" + TABLE.format(c, 5)}
        for a, b, c in (
            ("1,200", "2.0 times as fast", "7"),
            ("900", "about as fast", "7"),
            ("950.5", "1.5 times as fast", "6.5"),
        )
    ]
    combined = combine(runs)
    text = "It takes 900 to 1,200 ms, 1.0 to 2.0 times as fast.\n\n" + TABLE.format("6.5 to 7", 5)
    assert combined == {"1.md": text + "\n"}
    compare(runs[1], combined)  # a run does not differ from the ranges
    assert combine(runs[:1])["1.md"].strip() == runs[0]["1.md"]


def test_only_what_was_measured_may_differ() -> None:
    compare(
        {"1.md": "It takes 7 ms, 2.0 times as fast."}, {"1.md": "It takes 9 ms, about as fast."}
    )
    compare({"1.md": "0.123456 of it"}, {"1.md": "0.123457 of it"})
    for new, old in (("8 blocks", "9 blocks"), ("0.1 of it", "0.2 of it"), ("a cat", "a dog")):
        with pytest.raises(AssertionError):
            compare({"1.md": new}, {"1.md": old})
    assert mask(TABLE.format(3, 4)).endswith("| a | # | 4 |")


def test_questions_are_read_from_text() -> None:
    [first, second] = Questions("""
        Which (of two
        lines)?
        (a) One (b) not a choice.
        (b) Two.
        Answer: b. The why.
        Hint: Look.

        How many?
        Answer: 1. One.
        Hint: Count.
    """)
    assert first.text.splitlines()[0] == "Which (of two lines)?"
    assert (first.answer, first.why, first.hint) == ("b", "The why.", "Look.")
    assert second == ("How many?", "1", "One.", "Count.")


def test_answers_do_not_run_the_lesson(monkeypatch, capsys: Any) -> None:
    lessons = {number: command.load(number) for number in command.LESSONS}
    for number, lesson in lessons.items():
        monkeypatch.setattr(lesson, "run", lambda: pytest.fail("the lesson ran"))
        command.run_lesson(number, [])
        assert lesson.QUESTIONS
        for question in lesson.QUESTIONS:
            choices = re.findall(r"^\((\w)\) ", question.text, re.MULTILINE)
            assert not choices or question.answer in choices
            assert question.why.endswith(".")
            assert question.hint.endswith(("?", "."))
    assert "Hint" not in capsys.readouterr().out


def test_choices_do_not_give_the_answer_away() -> None:
    """Neither the length of a choice nor its letter tells whether it is right."""
    lessons = map(command.load, command.LESSONS)
    questions = [question for lesson in lessons for question in lesson.QUESTIONS]
    choices = [(q.answer, dict(re.findall(r"^\((\w)\) (.+)$", q.text, re.M))) for q in questions]
    choices = [(answer, texts) for answer, texts in choices if texts]
    for extreme in (max, min):
        lengths = [(len(texts[right]), [*map(len, texts.values())]) for right, texts in choices]
        assert sum(n == extreme(every) for n, every in lengths) <= 0.4 * len(choices)
    letters = Counter(answer for answer, _ in choices)
    assert sorted(letters) == ["a", "b", "c"]
    assert all(0.25 <= number / len(choices) <= 0.42 for number in letters.values())
