"""Build it: small parts of an engine, and an engine of them, with checks.

`python -m lessons build NAME` copies a stub with its task, and `--check FILE` checks a solution.
The checks are tests of the repository, so they need a clone and pytest. Puzzles are tasks too.
"""

import ast
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

from lessons.show import fill

STUBS = Path(__file__).with_name("tasks")
CHECKS = Path(__file__).parents[1] / "tests" / "lessons" / "exercises"
# In the order in which a reader writes them. The last is an engine of the others.
TASKS = (
    *("stop", "cache", "slots", "step", "filter", "prefix", "eviction", "preempt", "policy"),
    *("softmax", "replay", "ngram", "engine"),
)
CHECK = "python -m lessons build {} --check {}"
MAX_SECONDS = 60  # of the processor, for one check


def write(which: str | None) -> None:
    """Copy the stub of a task into the current directory, or list the tasks.

    Raises ValueError for an unknown task, FileExistsError if there is such a file already.
    """
    if which is None:
        for name in TASKS:
            text = ast.get_docstring(ast.parse((STUBS / f"{name}.py").read_text())) or ""
            print(fill(text.splitlines()[0], name.ljust(10), " " * 10))
        print("\n`python -m lessons build NAME` writes NAME.py into this directory, and")
        print(f"`{CHECK.format('NAME', 'NAME.py')}` checks it.")
        return
    require_task(which)
    target = Path(f"{which}.py").resolve()
    if target.exists():
        raise FileExistsError(
            f"{target} exists and is not overwritten; rename it, or work in another directory"
        )
    target.write_text((STUBS / target.name).read_text())
    print(f"{target} is written. The text at its top is the task. To check your solution, run")
    print(f"  {CHECK.format(which, target)}")
    print("It stops at the first check that fails. It needs pytest: pip install -e '.[test]'")


def check(which: str | None, file: str) -> None:
    """Run the checks of a task on the solution in `file`, and exit with pytest's status.

    They run in another process, which a wrong pointer of a kernel can end. Raises ValueError
    without pytest or outside a clone.
    """
    require_task(which)
    test = CHECKS / f"build_{which}.py"
    if not test.exists():
        raise ValueError(f"the checks are in a clone of the repository, and there is no {test}")
    if importlib.util.find_spec("pytest") is None:
        raise ValueError("the checks need pytest: pip install -e '.[test]'")
    short = ["-x", "-q", "-rN", "--tb=short", "--no-header", "--show-capture=stdout"]
    short.append(f"--rootdir={CHECKS.parents[2]}")
    alone = ["--noconftest", "-n", "0", "-p", "no:cacheprovider", "-p", __name__]
    command = [sys.executable, "-m", "pytest", *short, *alone, str(test)]
    environment = os.environ | {"SOLUTION": str(Path(file).resolve())}
    status = subprocess.run(command, env=environment, check=False).returncode
    if status == 0:
        print(f"All checks of {which} pass.")
    elif status < 0:
        print(f"It reads or writes where no memory is ({signal.Signals(-status).name}).")
    raise SystemExit(status)


def require_task(which: str | None) -> None:
    if which not in TASKS:
        raise ValueError(f"unknown task {which!r}; the tasks are {', '.join(TASKS)}")


# ---- this module is also a plugin of pytest, which calls these functions ----


def pytest_runtest_setup() -> None:
    """Let a check fail that does not end. The time of other programs does not count."""
    signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)


def pytest_runtest_teardown() -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _too_long(*_: object) -> None:
    import pytest

    pytest.fail(f"Your code does not end within {MAX_SECONDS} seconds.", pytrace=False)
