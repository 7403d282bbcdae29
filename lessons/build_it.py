"""Build it: small parts of an engine, and an engine of them, with checks.

`python -m lessons build NAME` copies a stub with its task, and `--check FILE` checks a solution.
The checks are tests of the repository, so they need a clone and pytest.
"""

import ast
import os
from pathlib import Path

from lessons.show import fill

STUBS = Path(__file__).with_name("tasks")
CHECKS = Path(__file__).parents[1] / "tests" / "lessons" / "exercises"
# The last is an engine of the others.
TASKS = ("cache", "slots", "prefix", "step", "softmax", "policy", "eviction", "filter", "engine")
CHECK = "python -m lessons build {} --check {}"


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

    Raises ValueError without pytest or outside a clone.
    """
    require_task(which)
    test = CHECKS / f"build_{which}.py"
    if not test.exists():
        raise ValueError(f"the checks are in a clone of the repository, and there is no {test}")
    try:
        import pytest
    except ImportError:
        raise ValueError("the checks need pytest: pip install -e '.[test]'") from None
    os.environ["SOLUTION"] = str(Path(file).resolve())
    short = ["-x", "-rN", "--tb=short", "--no-header"]
    alone = ["--noconftest", "-n", "0", "-p", "no:cacheprovider"]
    status = pytest.main([*short, *alone, f"--rootdir={CHECKS.parents[2]}", str(test)])
    if status == 0:
        print(f"All checks of {which} pass.")
    raise SystemExit(status)


def require_task(which: str | None) -> None:
    if which not in TASKS:
        raise ValueError(f"unknown task {which!r}; the tasks are {', '.join(TASKS)}")
