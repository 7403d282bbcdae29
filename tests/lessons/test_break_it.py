"""Exercises that break the engine: every fault has a short history that shows it."""

import logging
import re
import sys

import pytest

from lessons import break_it, command
from lessons.oracle import states
from lessons.oracle.mutants import MUTANTS, apply
from lessons.oracle.oracle import History, random_actions

FEW = (1, 16, 27)
EXERCISES = range(1, len(break_it.FAULTS) + 1)


@pytest.mark.parametrize(
    "number", [pytest.param(i, marks=() if i in FEW else pytest.mark.slow) for i in EXERCISES]
)
def test_exercise_asks(number: int, monkeypatch, capsys) -> None:
    """It shows what happens, and does not say what broke."""
    name = break_it.NAMES[number - 1]
    if number not in FEW:  # one failing history is made shorter, and in fewer ways
        monkeypatch.setattr(break_it, "FAILURES", 1)
        monkeypatch.setattr(break_it, "VARIATIONS", 3)
    break_it.run(str(number))
    asked = capsys.readouterr().out
    assert "Which of these is the first that was found not to hold?" in asked
    assert "step free cached" in asked
    assert "InvariantError" not in asked
    assert name not in " ".join(asked.split())
    assert max(map(len, asked.splitlines())) <= 101
    assert "must get" in asked
    assert ("has consumed" in asked) == (name in states.MUTANTS)  # the table of states
    # A sample has the name that it has in the trace: 0.0, not 0.
    names = re.findall(r"^([\d.]+) .* (?:running|waiting|finished|new)$", asked, re.MULTILINE)
    assert not {name.split(".")[0] for name in names if "." in name} & set(names)


def test_histories_of_single_samples_are_preferred() -> None:
    modules = {"schedulers": apply(MUTANTS["the oldest is preempted"])}
    attempt = break_it.shortest(modules, range(break_it.SEEDS), History)
    assert attempt.make.sample_counts == (1,)


@pytest.mark.parametrize("number", [*FEW, 2])
def test_exercise_answers(number: int, monkeypatch, capsys) -> None:
    monkeypatch.setattr(break_it, "FAILURES", 1)
    name = break_it.NAMES[number - 1]
    mutant = break_it.FAULTS[name]
    break_it.run(str(number), [])
    said = " ".join(capsys.readouterr().out.split())
    assert name[1:] in said
    assert ".." not in said.replace("...", "")
    break_it.run(str(number), ["0", mutant.function])
    said = capsys.readouterr().out
    assert said.count("is not right. Hint: ") == said.count(f"{mutant.function} is right") == 1


@pytest.mark.parametrize(("function", "right"), [("copy_on_write", True), ("match", False)])
def test_a_shared_block_is_written_by_two_functions(
    function: str, right: bool, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(break_it, "FAILURES", 1)
    monkeypatch.setattr(break_it, "VARIATIONS", 3)
    assert break_it.NAMES[8] == "a shared block is written in place"
    break_it.run("9", ["0", function])
    assert (f"{function} is right." in capsys.readouterr().out) == right


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a block is appended one token late", "raises IndexError('list index out of range')."),
        ("a resumed chunk starts one token late", "prompt: nothing"),
    ],
)
def test_what_answers_the_question_is_shown(name: str, shown: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(break_it, "FAILURES", 1)
    break_it.run(str(1 + break_it.NAMES.index(name)))
    assert shown in " ".join(capsys.readouterr().out.split())


def test_each_exercise_has_a_theme_and_a_level(capsys) -> None:
    assert sorted(i for ids, _ in break_it.THEMES.values() for i in ids) == list(EXERCISES)
    assert set(break_it.EASY) | set(break_it.HARD) <= set(EXERCISES)
    assert not set(break_it.EASY) & set(break_it.HARD)
    break_it.run()
    listed = capsys.readouterr().out
    assert "Prefix cache:\n" in listed
    assert "  break  1  easy    a fault in block_manager.py\n" in listed


def test_shorter_histories_fail_too() -> None:
    """A shortened history still fails, and is not longer."""
    mutant = MUTANTS["a reference is not counted"]
    modules = {"managers": apply(mutant)}
    attempts = [break_it.Attempt(modules, s, tuple(random_actions(s))) for s in range(20)]
    failing = [attempt for attempt in attempts if attempt.failure() is not None]
    assert failing
    for attempt in failing[:2]:
        length, short = break_it.shorten(attempt)
        assert length <= attempt.failure()
        assert len(short.actions) < len(attempt.actions)
        assert short.failure() == length


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["break", "99"], f"a number from 1 to {len(break_it.FAULTS)}, not '99'"),
        (["break", "one"], "not 'one'"),
        (["break", "1", "--answers", "1", "2", "3"], "there are 2 questions, and 3 answers"),
        (["99"], "there is no lesson 99"),
        (["3", "4"], "3 takes no 4"),
        (["3", "--check", "slots.py"], "3 takes no --check"),
        (["build", "none"], "unknown task 'none'; the tasks are attention, cache, m1"),
        (["ladder", "2"], "lesson 2 has no rung of the ladder; these have: 3, 5, 6, 8, 10, 11, 12"),
        (["puzzle", "6"], "a number from 1 to 5, not '6'"),
    ],
)
def test_command_refuses(args: list[str], message: str, monkeypatch, capsys, caplog) -> None:
    # The command sets the level of the log; pytest restores it.
    caplog.set_level(logging.INFO, "nanovllm")
    monkeypatch.setattr(sys, "argv", ["lessons", *args])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert message in capsys.readouterr().err
