"""`python -m lessons build NAME`, and what its checks say about right and wrong solutions."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import fresh
import pytest
from wrong_solutions import WRONG

from lessons import build_it, score

pytest_plugins = ["pytester"]

EXERCISES = Path(__file__).parent / "exercises"
ENGINES = [task for task in WRONG if task in build_it.PARTS]
TASKS = [task for task in build_it.TASKS if task not in ENGINES]
TIMES = max(len(WRONG[task]) for task in TASKS)
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
    """What the checks import and the right answers take seconds: here once, and not in each run."""
    import engine_answers
    from transformers import TypicalLogitsWarper  # noqa: F401

    from lessons.lesson import make_llm

    engine_answers.transformers_model()  # imports much more
    make_llm().generate("a", use_tqdm=False)  # with Numba, whose modules cannot be imported twice


@pytest.fixture
def check(imported: None, pytester, monkeypatch) -> Check:
    """Run the checks of some tasks on solutions, in this process -> exit status, output.

    They need nothing of conftest.py. pytester forgets the modules that they import, and takes a
    second to start, so that one run checks all tasks.
    """

    def run(solution: Path, *tasks: str) -> tuple[int, str]:
        monkeypatch.chdir(EXERCISES.parents[2])
        monkeypatch.setenv("SOLUTION", str(solution))
        options = ["-n0", "--tb=short", "--noconftest", "-p", "no:cacheprovider"]
        files = [str(EXERCISES / f"build_{task}.py") for task in tasks or TASKS]
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
def test_the_stubs_fail(check: Check, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for task in TASKS:
        build_it.write(task)
        line = f"python -m lessons build {task} --check "
        assert f"  {line}{tmp_path / f'{task}.py'}\n" in capsys.readouterr().out
    status, output = check(tmp_path)
    assert status == 1, output
    assert failed(output) == set(TASKS)
    assert " passed" not in output
    assert output.count("is to be written; see the top of this file") >= len(TASKS)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(TIMES))
def test_wrong_solutions_are_refused(check: Check, number: int, tmp_path) -> None:
    """The first wrong solution of each task, then the second, and so on, for the right reason."""
    wrong = {task: WRONG[task][number] for task in TASKS if number < len(WRONG[task])}
    for path in (EXERCISES / "solutions").glob("*.py"):
        text, (old, new, _) = path.read_text(), wrong.get(path.stem, ("", "", ""))
        assert old in text
        (tmp_path / path.name).write_text(text.replace(old, new) if old else text)
    status, output = check(tmp_path, *wrong)
    assert status == 1, output
    assert failed(output) == set(wrong)
    for task, (_, _, message) in wrong.items():
        assert message in output, (task, message)
    assert not re.search(r"build_\w+\.py:\d", output)  # the messages alone, without tracebacks


@pytest.mark.slow
@pytest.mark.parametrize("milestone", ENGINES)
def test_an_engine_passes_its_milestone(check: Check, milestone: str, monkeypatch) -> None:
    monkeypatch.setenv("MILESTONE", milestone)
    status, output = check(EXERCISES / "solutions" / f"{milestone}.py", "engine")
    assert status == 0, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("milestone", "number"), [(name, i) for name in ENGINES for i in range(len(WRONG[name]))]
)
def test_wrong_engines_are_refused(
    check: Check, milestone: str, number: int, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("MILESTONE", milestone)
    old, new, message = WRONG[milestone][number]
    for path in (EXERCISES / "solutions").glob("*.py"):
        text = path.read_text()
        if path.stem == milestone:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / path.name).write_text(text)
    status, output = check(tmp_path / f"{milestone}.py", "engine")
    assert status == 1, output
    assert message in output


def test_each_task_has_wrong_solutions() -> None:
    assert set(WRONG) == set(build_it.TASKS)
    assert min(len(WRONG[task]) for task in TASKS) >= 8
    assert sum(len(WRONG[task]) for task in ENGINES) >= 20


def test_milestones(tmp_path, monkeypatch, capsys) -> None:
    """All are about one file, and each checks the parts of the earlier ones first."""
    monkeypatch.chdir(tmp_path)
    for milestone in build_it.PARTS:
        build_it.write(milestone)
        line = f"python -m lessons build {milestone} --check {tmp_path / 'engine.py'}\n"
        printed = capsys.readouterr().out
        assert line in printed
        assert printed.startswith(milestone if milestone != "m1" else str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["engine.py"]
    files = [f"build_{name}.py" for name in ("cache", "slots", "step", "engine")]
    assert build_it.files_of("m3") == files
    assert build_it.files_of("step") == ["build_step.py"]


@pytest.mark.slow
def test_a_check_as_json(tmp_path) -> None:
    solution = EXERCISES / "solutions" / "slots.py"
    (tmp_path / "slots.py").write_text(solution.read_text().replace("+ count", "- count"))
    for file, passed in ((solution, True), (tmp_path / "slots.py", False)):
        done = fresh.run(fresh.module("lessons", "build", "slots", "--check", str(file), "--json"))
        result = json.loads(done.stdout)
        assert (result["task"], result["passed"]) == ("slots", passed)
        assert ("All checks of slots pass." in result["output"]) == passed


def test_the_score(tmp_path, monkeypatch, capsys) -> None:
    """Nothing is recorded before the first call of `show`."""
    monkeypatch.chdir(tmp_path)
    score.record("task", "slots")
    score.show()
    assert "tasks: none\nfaults: 0, of which 0 at the first try\n" in capsys.readouterr().out
    for kind, name, tries in (
        ("task", "m1", 0),
        ("fault", "15", 2),
        ("fault", "15", 1),
        ("fault", "1", 1),
        ("question", "Why?", 1),
    ):
        score.record(kind, name, tries)
    score.show()
    printed = capsys.readouterr().out
    assert printed == (
        "tasks: m1\nfaults: 2, of which 1 at the first try\n"
        "questions: 1, of which 1 at the first try\n"
    )


@pytest.mark.slow
def test_a_solution_is_checked_from_any_directory(tmp_path) -> None:
    solution = EXERCISES / "solutions" / "slots.py"
    text = solution.read_text()
    (tmp_path / "mine.py").write_text(text.replace("start + count)", "start + count - 1)"))
    arguments = ["build", "slots", "--check"]
    right = fresh.run(fresh.module("lessons", *arguments, str(solution)))
    wrong = fresh.run(fresh.module("lessons", *arguments, str(tmp_path / "mine.py")))
    assert (right.returncode, wrong.returncode) == (0, 1)
    assert right.stdout.endswith("All checks of slots pass.\n")
    assert "should be [30, 31, 8, 9], but with your code it is [30, 31, 8]." in wrong.stdout


@pytest.mark.slow
def test_a_missing_solution_is_named(check: Check, tmp_path) -> None:
    status, output = check(tmp_path / "none.py", "policy")
    assert status == 2
    assert f"There is no file {tmp_path / 'none.py'}. `python -m lessons build" in output
    assert "build_check.py:" not in output  # no traceback


def test_a_check_that_does_not_end_fails(monkeypatch) -> None:
    monkeypatch.setattr(build_it, "MAX_SECONDS", 0.2)
    build_it.pytest_runtest_setup()
    with pytest.raises(pytest.fail.Exception, match="does not end within 0.2 seconds"):
        while True:
            pass


def test_tasks_are_listed(capsys) -> None:
    build_it.run()
    lines = capsys.readouterr().out.splitlines()
    listed = [
        line.split()[0] for line in lines if line and not line.startswith((" ", "The number"))
    ]
    assert listed == list(build_it.TASKS)


def test_nothing_is_overwritten(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "filter.py").write_text("mine")
    with pytest.raises(FileExistsError, match=r"filter\.py exists and is not overwritten"):
        build_it.write("filter")
    assert (tmp_path / "filter.py").read_text() == "mine"
