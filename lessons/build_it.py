"""Build it: small parts of an engine, and an engine of them, with checks.

`python -m lessons build NAME` copies a stub with its task, and `--check FILE` checks a solution.
The checks are tests, which need pytest.
"""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

from lessons import ladder
from lessons.show import fill, say

STUBS = Path(__file__).with_name("tasks")
CHECKS = Path(__file__).parents[1] / "tests" / "lessons" / "exercises"
# Task -> its lesson, in the order in which a reader writes them. The last joins the others.
TASKS = {
    **{"stop": "1", "cache": "3", "slots": "5", "step": "6", "filter": "7", "prefix": "8"},
    **{"eviction": "8", "preempt": "9", "policy": "9", "softmax": "10", "replay": "11"},
    **{"ngram": "drafts", "engine": "12"},
}
MAX_SECONDS = 60  # of the processor, for one check


def run(which: str | None = None, check: str | None = None) -> None:
    """List the tasks, write the stub of `which`, or check the solution in the file `check`."""
    if which is None and check is None:
        for name in TASKS:
            text = ast.get_docstring(ast.parse((STUBS / f"{name}.py").read_text())) or ""
            print(fill(text.splitlines()[0], name.ljust(10), " " * 10))
        print("`python -m lessons build NAME` writes NAME.py, whose text is the task.")
    elif which not in TASKS:
        raise ValueError(f"unknown task {which!r}; the tasks are {', '.join(TASKS)}")
    elif check is None:
        write(which)
    else:
        run_checks(which, check)
        print(f"All checks of {which} pass.", end="\n\n")
        lesson = TASKS[which]
        if lesson in ladder.LESSONS and which != "replay":  # no rung of the ladder has graphs
            say(f"""What the idea of lesson {lesson} brings, measured with the engine's code, and
                not with yours. This takes up to a minute.""")
            ladder.run(lesson)


def write(task: str) -> None:
    """Copy the stub of a task into the current directory."""
    target = Path(f"{task}.py").resolve()
    if target.exists():
        raise FileExistsError(f"{target} exists and is not overwritten; rename it")
    target.write_text((STUBS / target.name).read_text())
    print(f"{target} is written. The text at its top is the task. To check your solution, run")
    print(f"  python -m lessons build {task} --check {target}")


def run_checks(name: str, file: str, **variables: str) -> None:
    """Run the checks in build_NAME.py on `file`. Exits with pytest's status if one fails.

    They run in another process, which a wrong pointer of a kernel can end.
    """
    short = ["-xqrN", "--tb=short", "--no-header", "--show-capture=stdout", "-n0", "--noconftest"]
    plugins = ["-p", __name__, "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    command = [sys.executable, "-m", "pytest", *short, *plugins, str(CHECKS / f"build_{name}.py")]
    environment = os.environ | variables | {"SOLUTION": str(Path(file).resolve())}
    status = subprocess.run(command, env=environment, check=False).returncode
    if status < 0:
        print(f"It reads or writes where no memory is ({signal.Signals(-status).name}).")
    if status:
        raise SystemExit(status)


def pytest_runtest_setup() -> None:
    """Let a check fail that does not end. pytest calls it, because this module is also a plugin."""
    import pytest

    message = f"Your code does not end within {MAX_SECONDS} seconds."
    signal.signal(signal.SIGVTALRM, lambda *_: pytest.fail(message, pytrace=False))
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
