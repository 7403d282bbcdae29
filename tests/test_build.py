"""`python -m nanovllm.lessons build NAME`, and what its checks say about right and wrong solutions."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanovllm.lessons import build_it

pytest_plugins = ["pytester"]

EXERCISES = Path(__file__).parent / "exercises"
# (task, a piece of the solution, what replaces it, the check that fails first, part of its message)
WRONG = [
    ("policy", "AGING * seq.arrival - (", "-(", "test_order_of_admission", "order of admission is [1, 0, 2], but it is [1, 2, 0]"),
    ("policy", "seq.max_length - seq.num_prompt", "seq.max_length", "test_a_long_prompt", "admitted first, but the order is [0, 1]"),
    ("eviction", "self.hits[block.block_id] = 0", "pass", "test_hits_belong", "New content should start with 0 hits"),
    ("eviction", "min(self.evictable,", "min(reversed(self.evictable),", "test_fewest_hits", "[3, 2, 1], but it is [2, 3, 1]"),
    ("eviction", "min(self.evictable, key=self.hits.__getitem__)", "super().choose_victim()", "test_fewest_hits", "[3, 2, 1], but it is [1, 3, 2]"),
    ("filter", "nansum", "sum", "test_what_is_hidden", "An earlier filter has hidden tokens 20 to 59"),
    ("filter", "before < typical_p[:, None]", "before < typical_p.max()", "test_each_row", "as it does alone"),
    ("filter", "(distance > last) & (typical_p < 1)[:, None]", "distance > last", "test_one_turns_it_off", "typical_p=1 should not change"),
]  # fmt: skip


Check = Callable[[str, Path], tuple[int, str]]


@pytest.fixture(scope="session")
def imported() -> None:
    """What the checks import from transformers takes seconds: here once, and not in each run."""
    from transformers import TypicalLogitsWarper  # noqa: F401


@pytest.fixture
def check(imported: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run the checks of a task on a solution, in this process -> exit status, output.

    They need nothing of conftest.py. pytester forgets the modules that they import.
    """

    def run(task: str, solution: Path) -> tuple[int, str]:
        monkeypatch.chdir(EXERCISES.parents[1])
        monkeypatch.setenv("SOLUTION", str(solution))
        options = ["-x", "-n0", "--noconftest", "-p", "no:cacheprovider"]
        result = pytester.runpytest_inprocess(*options, str(EXERCISES / f"build_{task}.py"))
        return int(result.ret), result.stdout.str() + result.stderr.str()

    return run


@pytest.mark.slow
@pytest.mark.parametrize("task", build_it.TASKS)
def test_the_solution_passes(check: Check, task: str) -> None:
    status, output = check(task, EXERCISES / "solutions" / f"{task}.py")
    assert status == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("task", build_it.TASKS)
def test_the_stub_fails(
    check: Check,
    task: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    build_it.write(task)
    stub = tmp_path / f"{task}.py"
    assert (
        f"SOLUTION={stub} python -m pytest -x --tb=short tests/exercises/build_{task}.py"
        in capsys.readouterr().out
    )
    status, output = check(task, stub)
    assert status == 1, output
    assert "is to be written; see the top of this file" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "old", "new", "name", "message"), WRONG, ids=[f"{w[0]}: {w[2]}" for w in WRONG]
)
def test_a_wrong_solution_fails(
    check: Check, task: str, old: str, new: str, name: str, message: str, tmp_path: Path
) -> None:
    text = (EXERCISES / "solutions" / f"{task}.py").read_text()
    assert text.count(old) == 1
    (tmp_path / "wrong.py").write_text(text.replace(old, new))
    status, output = check(task, tmp_path / "wrong.py")
    assert status == 1, output
    assert message in output
    assert f"FAILED tests/exercises/build_{task}.py::{name}" in output
    assert not re.search(r"build_\w+\.py:\d", output)  # the message alone, without a traceback


@pytest.mark.slow
def test_the_printed_command_checks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, with conftest.py, as a learner runs it."""
    monkeypatch.chdir(tmp_path)
    build_it.write("policy")
    [line] = [x.strip() for x in capsys.readouterr().out.splitlines() if "SOLUTION=" in x]
    command = line.replace(" python ", f" {shlex.quote(sys.executable)} ")
    done = subprocess.run(
        command, shell=True, cwd=EXERCISES.parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "is to be written; see the top of this file" in done.stdout


@pytest.mark.slow
def test_a_missing_solution_is_named(check: Check, tmp_path: Path) -> None:
    status, output = check("policy", tmp_path / "none.py")
    assert status == 2
    assert f"There is no file {tmp_path / 'none.py'}. `python -m nanovllm.lessons build" in output
    assert "build_check.py:" not in output  # no traceback


def test_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    build_it.write(None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == list(build_it.TASKS)


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "filter.py").write_text("mine")
    with pytest.raises(FileExistsError, match=r"filter\.py exists and is not overwritten"):
        build_it.write("filter")
    assert (tmp_path / "filter.py").read_text() == "mine"


def test_an_unknown_task_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="'police'; the tasks are policy, eviction, filter"):
        build_it.write("police")
    assert not list(tmp_path.iterdir())
