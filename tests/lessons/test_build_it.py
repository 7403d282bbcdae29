"""`python -m lessons build NAME`, and what its checks say about right and wrong solutions."""

import re
from collections.abc import Callable
from pathlib import Path

import fresh
import pytest
from wrong_solutions import WRONG

from lessons import build_it
from nanovllm.config import EMBEDDED
from nanovllm.loading.checkpoint import find_checkpoint

pytest_plugins = ["pytester"]

EXERCISES = Path(__file__).parent / "exercises"
TIMES = max(map(len, WRONG.values()))
Check = Callable[..., tuple[int, str]]


class FirstFailures:
    """Leaves out what follows the first failure of a file, as -x does with one file."""

    def __init__(self) -> None:
        self.failed: set[str] = set()  # files

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.location[0] in self.failed:
            pytest.skip("after a failure")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.location[0])


@pytest.fixture(scope="session")
def imported() -> None:
    """What the checks import takes seconds: here once, and not in each run."""
    from transformers import AutoModelForCausalLM, TypicalLogitsWarper  # noqa: F401

    from lessons import lesson02_model  # noqa: F401

    AutoModelForCausalLM.from_pretrained(find_checkpoint(EMBEDDED))  # imports much more


@pytest.fixture
def check(imported: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run the checks of some tasks on solutions, in this process -> exit status, output.

    They need nothing of conftest.py. pytester forgets the modules that they import, and takes a
    second to start, so that one run checks all tasks.
    """

    def run(solution: Path, *tasks: str) -> tuple[int, str]:
        monkeypatch.chdir(EXERCISES.parents[2])
        monkeypatch.setenv("SOLUTION", str(solution))
        options = ["-n0", "--tb=short", "--noconftest", "-p", "no:cacheprovider"]
        files = [str(EXERCISES / f"build_{task}.py") for task in tasks or build_it.TASKS]
        result = pytester.runpytest_inprocess(*options, *files, plugins=[FirstFailures()])
        return int(result.ret), result.stdout.str() + result.stderr.str()

    return run


def failed(output: str) -> set[str]:
    return set(
        re.findall(r"^FAILED tests/lessons/exercises/build_(\w+)\.py::", output, re.MULTILINE)
    )


@pytest.mark.slow
def test_the_solutions_pass(check: Check) -> None:
    status, output = check(EXERCISES / "solutions")
    assert status == 0, output


@pytest.mark.slow
def test_the_stubs_fail(
    check: Check,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for task in build_it.TASKS:
        build_it.write(task)
        line = f"python -m lessons build {task} --check "
        assert f"  {line}{tmp_path / f'{task}.py'}\n" in capsys.readouterr().out
    status, output = check(tmp_path)
    assert status == 1, output
    assert failed(output) == set(build_it.TASKS)
    assert " passed" not in output
    assert output.count("is to be written; see the top of this file") >= len(build_it.TASKS)


@pytest.mark.slow
@pytest.mark.parametrize("is_engine", [False, True])  # the engine imports right solutions
@pytest.mark.parametrize("number", range(TIMES))
def test_wrong_solutions_are_refused(
    check: Check, number: int, is_engine: bool, tmp_path: Path
) -> None:
    """The first wrong solution of each task, then the second, and so on, for the right reason."""
    tasks = [task for task in WRONG if (task == "engine") == is_engine]
    wrong = {task: WRONG[task][number] for task in tasks if number < len(WRONG[task])}
    for path in (EXERCISES / "solutions").glob("*.py"):
        text, (old, new, _) = path.read_text(), wrong.get(path.stem, ("", "", ""))
        assert old in text
        (tmp_path / path.name).write_text(text.replace(old, new) if old else text)
    if not wrong:
        return
    status, output = check(tmp_path, *wrong)
    assert status == 1, output
    assert failed(output) == set(wrong)
    for task, (_, _, message) in wrong.items():
        assert message in output, (task, message)
    assert not re.search(r"build_\w+\.py:\d", output)  # the messages alone, without tracebacks


def test_each_task_has_wrong_solutions() -> None:
    assert list(WRONG) == list(build_it.TASKS)
    assert min(map(len, WRONG.values())) >= 8


@pytest.mark.slow
def test_a_solution_is_checked_from_any_directory(tmp_path: Path) -> None:
    solution = EXERCISES / "solutions" / "slots.py"
    text = solution.read_text()
    (tmp_path / "mine.py").write_text(text.replace("start + count)", "start + count - 1)"))
    arguments = ["build", "slots", "--check"]
    right = fresh.run(fresh.module("lessons", *arguments, str(solution)))
    wrong = fresh.run(fresh.module("lessons", *arguments, str(tmp_path / "mine.py")))
    assert (right.returncode, wrong.returncode) == (0, 1)
    assert "All checks of slots pass.\n\nWhat the idea of lesson 5 brings, " in right.stdout
    assert re.search("^5 blocks +240 ", right.stdout, re.MULTILINE)
    assert "should be [30, 31, 8, 9], but with your code it is [30, 31, 8]." in wrong.stdout


@pytest.mark.slow
def test_a_missing_solution_is_named(check: Check, tmp_path: Path) -> None:
    status, output = check(tmp_path / "none.py", "policy")
    assert status == 2
    assert f"There is no file {tmp_path / 'none.py'}. `python -m lessons build" in output
    assert "build_check.py:" not in output  # no traceback


def test_a_check_that_does_not_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_it, "MAX_SECONDS", 0.2)
    build_it.pytest_runtest_setup()
    with pytest.raises(pytest.fail.Exception, match="does not end within 0.2 seconds"):
        while True:
            pass


def test_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    build_it.run()
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if line and not line.startswith((" ", "`"))]
    assert listed == list(build_it.TASKS)


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "filter.py").write_text("mine")
    with pytest.raises(FileExistsError, match=r"filter\.py exists and is not overwritten"):
        build_it.write("filter")
    assert (tmp_path / "filter.py").read_text() == "mine"
