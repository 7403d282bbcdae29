"""What the lessons share, lesson 5, and the command."""

import ast
import logging
import re
import sys
from pathlib import Path

import fresh
import pytest
from lesson_runs import run_lesson

from lessons import (
    build_it,
    command,
    lesson01a_request,
    lesson01b_text,
    lesson05_blocks,
    lesson12_engine,
)
from lessons.lesson import make_llm
from lessons.show import (
    Question,
    compare,
    faster,
    link,
    say,
    show_answers,
    show_question,
    show_table,
)
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Scheduler

PACKAGE = Path(__file__).parents[2] / "nanovllm"


def test_links_name_the_line() -> None:
    path, line = link(Scheduler.preempt, "seq.preemptions += 1").split("  ")[0].split(":")
    text = (Path(__file__).parents[2] / path).read_text().splitlines()[int(line) - 1]
    assert text.strip() == "seq.preemptions += 1"
    assert link(LLMEngine.run_step).startswith("nanovllm/engine/llm_engine.py:"), (
        "it has a decorator"
    )
    with pytest.raises(ValueError, match="no line of Scheduler.preempt contains 'there is no"):
        link(Scheduler.preempt, "there is no such line")


def test_answers_are_compared(capsys) -> None:
    questions = [
        Question("One?", "1", "Why one.", "Look at one."),
        Question("Two?", "2000 or two", "Why two.", "Look at two."),
    ]
    for given in ("2,000", "(TWO)", "2000 tokens", "2000."):
        show_answers(questions, ["2", given])
        compared = capsys.readouterr().out
        assert "2 is not right. Hint: Look at one.\n" in compared
        assert f"{given.rstrip('.')} is right. Why two." in compared
    for given in ("20", "2000 of 1", "2000.5", "-2000"):
        show_answers(questions, ["1", given])
        assert f"{given} is not right" in capsys.readouterr().out
    assert "Why one" not in compared
    assert "Look at two" not in compared
    show_answers(questions, [])
    assert "1. Why one." in capsys.readouterr().out
    show_answers(questions, ["1"])
    assert "Two?" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="there are 2 questions, and 3 answers"):
        show_answers(questions, ["1", "2", "3"])


@pytest.mark.parametrize(
    ("answer", "given", "right"),
    [
        ("b", "b, since nobody is admitted", True),
        ("b", "(b)", True),
        ("b", "b.", True),
        ("b", "B because of 2 rows", True),
        ("b", "not b", False),
        ("b", "both", False),
        ("b", "a, because of b", False),
        ("yes", "yes, because one candidate", True),
        ("yes", "no, because of yes", False),
        ("_make_room", "_make_room, before it preempts", True),
        ("1.6", "1.6", True),
        ("15.5", "-15.5", False),
    ],
)
def test_the_first_word_of_an_answer_counts(answer: str, given: str, right: bool) -> None:
    shown = compare(Question("Which?", answer, "Why.", "Look."), given)
    assert (f"{given.partition(', ')[0].rstrip('.')} is right. Why." == shown) == right
    assert shown.endswith("is not right. Hint: Look.") == (not right)


def test_a_ratio_of_noise_is_no_gain() -> None:
    assert faster(2.0, 1.0) == "2.0 times as fast"
    assert faster(1.0, 2.5) == "2.5 times as slow"
    assert faster(1.0, 0.95) == faster(0.95, 1.0) == "about as fast"


@pytest.mark.parametrize("columns", [44, 80, 100, 200])
def test_nothing_is_wider_than_the_terminal(columns: int, monkeypatch, capsys) -> None:
    """Text wraps, a table becomes a list, and a picture stays as it is."""
    monkeypatch.setenv("COLUMNS", str(columns))
    words = "many words in one paragraph " * 20
    say(f"{words}\n\n    a  picture\n    |\n\n{words}")
    show_table(("name", "first number", "second number"), [("a", "1 " * 22, "2 " * 20)])
    show_question([Question(f"{words}\n(a) {words}", "1", words, words)], 1)
    show_answers([Question(words, "1", words, words)] * 2, ["1", "2"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= min(columns, 100)
    assert "\n    a  picture\n    |\n" in printed
    assert ("second number: 2 2" in " ".join(printed.split())) == (columns < 100)


def test_tables_are_aligned(capsys) -> None:
    show_table(("name", "n"), [("a", 1), ("long name", 100)])
    assert capsys.readouterr().out == "name         n\na            1\nlong name  100\n\n"


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["2", "1", "b"], "2 is not right. Hint: Which"),
        (["1 token", "a", "c"], "1 token is right. The keys"),
        (["", ""], "\n5. The"),
        ([], "\n5. The"),  # Ctrl-D
    ],
)
def test_a_question_waits_for_an_answer_in_a_terminal(
    typed: list[str], shown: str, monkeypatch, capsys
) -> None:
    """A wrong answer may be given once more."""
    left = iter(typed)

    def read(prompt: str) -> str:
        print(prompt)
        if (answer := next(left, None)) is None:
            raise EOFError
        return answer

    monkeypatch.setattr("builtins.input", read)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    lesson01a_request.run()
    printed = capsys.readouterr().out
    assert next(left, None) is None
    assert printed.count("Your answer (Enter skips it): ") == 2
    assert printed.count("Once more (Enter skips it): ") == max(0, len(typed) - 2)
    assert printed.index("Question 1") < printed.index(shown) < printed.index("Question 2")


def test_lesson_1a() -> None:
    """Without a terminal it shows no answer."""
    assert "Answer" not in run_lesson("1a")


def test_lesson_1b() -> None:
    """A stream waits for what may begin a stop string."""
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=64)
    for stops, text in ((["never"], "12 + 30 = 42"), (["30 ="], "12 + "), (["42"], "12 + 30 = ")):
        rows = lesson01b_text.stream(llm, stops)
        assert rows[-1][1:] == (repr(text), "''")
        held = [ast.literal_eval(row[2]) for row in rows[:-1]]
        assert max(map(len, held)) == len(stops[0]) - 1
    run_lesson("1b")


def test_lesson_12() -> None:
    """Its questions are about what its trace shows."""
    events = lesson12_engine.trace().events
    plans = {event["plan"]: event for event in events if "plan" in event}
    assert [plan for plan, event in plans.items() if event.get("preempted")] == [7]
    sampled = [event["commit"] for event in events if len(event.get("tokens", ())) == 3]
    seventh, before, tenth = (int(question.answer) for question in lesson12_engine.QUESTIONS)
    assert len(sampled) == before
    printed = run_lesson("12")
    lines = printed.splitlines()
    [again] = [line.split()[2] for line in lines if line.split()[:2] == ["2", "again"]]
    assert again == "4-12"  # as the answer says
    for number, tokens in ((7, seventh), (10, tenth)):
        chunks = sum(count for *_, count in plans[number]["chunks"])
        assert len(plans[number]["decodes"]) + chunks == tokens
    builds = {task for _, task, *_ in lesson12_engine.PARTS if task}
    assert builds == {*build_it.TASKS} - {"ngram", "delta", *build_it.PARTS}
    assert all((PACKAGE / place).exists() for *_, place, _ in lesson12_engine.PARTS)


def test_lesson_5() -> None:
    """Small blocks let more requests run."""
    slots = lesson05_blocks.slots_of_a_sequence()
    assert slots == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21]
    printed = run_lesson("5")
    rows = [line.split() for line in printed.splitlines() if " blocks of " in line]
    (_, _, _, _, few, slow), (_, _, _, _, many, fast) = (row for row in rows if row[0].isdigit())
    assert few == lesson05_blocks.QUESTIONS[1].answer == "4"
    assert int(many) == 24
    assert int(fast) * 4 < int(slow)


@pytest.mark.slow
def test_command(monkeypatch, capsys, caplog) -> None:
    done = fresh.run(fresh.module("lessons", "5"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Lesson 5: blocks, block tables, slots.")
    assert "    block table   [      1      |" in done.stdout  # the picture
    assert "python -m lessons 5 --answers ANSWER1 ANSWER2\n" in done.stdout
    assert "block_table =" in done.stdout
    # The command sets the level of the log; pytest restores it.
    caplog.set_level(logging.INFO, "nanovllm")
    monkeypatch.setattr(sys, "argv", ["lessons", "5", "--answers", "66", "A"])
    command.main()
    compared = capsys.readouterr().out
    assert "66 is right" in compared
    assert "block_table =" not in compared


def test_the_list(monkeypatch, capsys, caplog) -> None:
    caplog.set_level(logging.INFO, "nanovllm")
    monkeypatch.setattr(sys, "argv", ["lessons"])
    command.main()
    printed = capsys.readouterr().out
    for name in command.LESSONS:
        assert command.title(name) in " ".join(printed.split())
    assert "python -m lessons ladder " in printed


def test_only_commands_that_show_times_say_that_the_machine_is_busy(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command.machine, "other_load", lambda since: 0.5)
    command.run("break", {})
    command.run("build", {})
    assert "The machine is busy" not in capsys.readouterr().out
    monkeypatch.setattr(command.load("ladder"), "run", lambda: None)
    command.run("ladder", {})
    assert "The machine is busy: the times mean little. Others took 50%" in capsys.readouterr().out
    check = {"which": "m1", "check": "engine.py"}
    assert command.shows_times("build", check)
    assert not command.shows_times("build", check | {"json": True})
    assert not command.shows_times("build", check | {"which": "slots"})
    assert [what for what in command.LESSONS if command.shows_times(what, {})] == [
        *("3", "4", "6b", "11a", "11c", "structured_outputs")
    ]


def test_every_lesson_has_a_title_and_a_place_in_the_docs() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "lessons.md").read_text()
    for name, module in command.LESSONS.items():
        kind = "Elective" if name in command.ELECTIVES else "Lesson"
        assert command.title(name).startswith(f"{kind} {name}: ")
        assert f"| [{name}](lessons/" in docs
    glossary = docs[docs.index("## Glossary") :]
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| [^|]* \| (?!lesson)([\w, ]+) \|$", glossary, re.MULTILINE
    )
    assert len(rows) > 30
    used = {name for _, names in rows for name in names.split(", ")}
    assert used == {name.rstrip("abcd") for name in command.LESSONS}


@pytest.mark.parametrize("name", command.LESSONS)
def test_every_lesson_has_a_picture(name: str) -> None:
    path = Path(command.__file__).with_name(f"{command.LESSONS[name]}.py")
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    pictures = [part for part in text.split("\n\n") if part.startswith(" ")]
    assert pictures
    assert all(len(line) <= 80 for part in pictures for line in part.splitlines())
