"""`nanovllm lessons build NAME`, and what its checks say about right and wrong solutions."""

import ast
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from nanovllm.lessons import build_it

pytest_plugins = ["pytester"]

EXERCISES = Path(__file__).parent / "exercises"
# (task, a piece of the solution, what replaces it, the check that fails first, part of its message)
WRONG = [
    ("cache", "before + torch.arange", "torch.arange", "test_one_by_one", "differs from torch's"),
    (
        "cache",
        "seen = torch.arange(len(keys)) <=",
        "seen = torch.arange(len(keys)) * 0 <=",
        "test_one_piece",
        "tokens [0, 1, 2, 3]",
    ),
    (
        "cache",
        "repeat_interleave(group, dim=1)",
        "repeat(1, group, 1)",
        "test_groups",
        "6 query heads, 2 KV heads",
    ),
    (
        "slots",
        "* block_size + position % block_size",
        "+ position % block_size",
        "test_slots",
        "the slots [30, 31, 8, 9], but yours have",
    ),
    (
        "slots",
        "-(-(start + count) // block_size)",
        "(start + count) // block_size",
        "test_blocks",
        "1 blocks should be appended, but yours says 0",
    ),
    (
        "prefix",
        "(len(seq.token_ids) - 1) //",
        "len(seq.token_ids) //",
        "test_matches",
        "should match the blocks [[5, 6]], but",
    ),
    (
        "prefix",
        "parent = block.serial",
        "parent = 0",
        "test_matches",
        "should match the blocks [[5, 6], [7, 8]], but",
    ),
    (
        "prefix",
        "break",
        "continue",
        "test_matches",
        "should match the blocks [[5, 6]], but",
    ),
    ("step", "if tokens > 0:", "if True:", "test_the_plan", "but it is [1, 0, 1, 1]"),
    (
        "step",
        "len(running) < max_num_seqs",
        "True",
        "test_the_plan",
        "The expected plan is [1, 1, 4]",
    ),
    (
        "softmax",
        "first, second = torch.exp(one[0] - base), torch",
        "first, second = torch.ones(()), torch",
        "test_the_example",
        "should be [3.0, 1.5, 38.71]",
    ),
    (
        "softmax",
        "base = torch.where(m == -torch.inf, 0.0, m)",
        "base = m",
        "test_hidden",
        "tile 0 of 3 are -inf",
    ),
    (
        "policy",
        "AGING * seq.arrival - (",
        "-(",
        "test_order_of_admission",
        "order of admission is [1, 0, 2], but it is [1, 2, 0]",
    ),
    (
        "policy",
        "seq.max_length - seq.num_prompt",
        "seq.max_length",
        "test_a_long_prompt",
        "admitted first, but the order is [0, 1]",
    ),
    (
        "eviction",
        "self.hits[block.block_id] = 0",
        "pass",
        "test_hits_belong",
        "New content should start with 0 hits",
    ),
    (
        "eviction",
        "min(self.evictable,",
        "min(reversed(self.evictable),",
        "test_fewest_hits",
        "[3, 2, 1], but it is [2, 3, 1]",
    ),
    (
        "eviction",
        "min(self.evictable, key=self.hits.__getitem__)",
        "super().choose_victim()",
        "test_fewest_hits",
        "[3, 2, 1], but it is [1, 3, 2]",
    ),
    (
        "filter",
        "nansum",
        "sum",
        "test_what_is_hidden",
        "An earlier filter has hidden tokens 20 to 59",
    ),
    (
        "filter",
        "before < typical_p[:, None]",
        "before < typical_p.max()",
        "test_each_row",
        "as it does alone",
    ),
    (
        "filter",
        "(distance > last) & (typical_p < 1)[:, None]",
        "distance > last",
        "test_one_turns_it_off",
        "typical_p=1 should not change",
    ),
]


TIMES = max(Counter(task for task, *_ in WRONG).values())
Check = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def imported() -> None:
    """What the checks import from transformers takes seconds: here once, and not in each run."""
    from transformers import TypicalLogitsWarper  # noqa: F401


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
        result = pytester.runpytest_inprocess(*options, *files)
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
        command = "SOLUTION={} python -m pytest -x --tb=short tests/lessons/exercises/build_{}.py"
        assert command.format(tmp_path / f"{task}.py", task) in capsys.readouterr().out
        text = ast.get_docstring(ast.parse((tmp_path / f"{task}.py").read_text())) or ""
        assert text.endswith(command.format(f"{task}.py", task))
    status, output = check(tmp_path)
    assert status == 1, output
    assert failed(output) == set(build_it.TASKS)
    assert " passed" not in output
    assert output.count("is to be written; see the top of this file") >= len(build_it.TASKS)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(TIMES))
def test_wrong_solutions_fail(check: Check, number: int, tmp_path: Path) -> None:
    """The first fault of each task, then the second of those that have two, and so on."""
    wrong = {}
    for task in build_it.TASKS:
        faults = [fault for fault in WRONG if fault[0] == task][number : number + 1]
        text = (EXERCISES / "solutions" / f"{task}.py").read_text()
        for fault in faults:
            assert text.count(fault[1]) == 1
            (tmp_path / f"{task}.py").write_text(text.replace(fault[1], fault[2]))
            wrong[task] = fault
    status, output = check(tmp_path, *wrong)
    assert status == 1, output
    assert failed(output) == set(wrong)
    for task, _, _, name, message in wrong.values():
        assert message in output
        assert f"FAILED tests/lessons/exercises/build_{task}.py::{name}" in output
    assert not re.search(r"build_\w+\.py:\d", output)  # the messages alone, without tracebacks


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
        command, shell=True, cwd=EXERCISES.parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "is to be written; see the top of this file" in done.stdout


@pytest.mark.slow
def test_a_missing_solution_is_named(check: Check, tmp_path: Path) -> None:
    status, output = check(tmp_path / "none.py", "policy")
    assert status == 2
    assert f"There is no file {tmp_path / 'none.py'}. `nanovllm lessons build" in output
    assert "build_check.py:" not in output  # no traceback


def test_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    build_it.write(None)
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if line and not line.startswith((" ", "`"))]
    assert listed == list(build_it.TASKS)


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "filter.py").write_text("mine")
    with pytest.raises(FileExistsError, match=r"filter\.py exists and is not overwritten"):
        build_it.write("filter")
    assert (tmp_path / "filter.py").read_text() == "mine"


def test_an_unknown_task_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="'police'; the tasks are cache, slots, prefix"):
        build_it.write("police")
    assert not list(tmp_path.iterdir())
