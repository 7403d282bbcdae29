"""Build it: three small tasks with checks. `build NAME` copies a stub, which says what to do."""

import ast
from pathlib import Path

STUBS = Path(__file__).with_name("tasks")
TASKS = ("policy", "eviction", "filter")


def write(which: str | None) -> None:
    """Copy the stub of a task into the current directory, or list the tasks.

    Raises ValueError for an unknown task, FileExistsError if there is such a file already.
    """
    if which is None:
        for name in TASKS:
            text = ast.get_docstring(ast.parse((STUBS / f"{name}.py").read_text())) or ""
            print(f"{name.ljust(10)}{text.splitlines()[0]}")
        print(
            "\n`python -m nanovllm.lessons build NAME` writes NAME.py into the current directory."
        )
        return
    if which not in TASKS:
        raise ValueError(f"unknown task {which!r}; the tasks are {', '.join(TASKS)}")
    target = Path(f"{which}.py").resolve()
    try:
        with target.open("x") as file:
            file.write((STUBS / target.name).read_text())
    except FileExistsError:
        raise FileExistsError(
            f"{target} exists and is not overwritten; rename it, or work in another directory"
        ) from None
    print(f"{target} is written. The text at its top is the task. To check your solution, run")
    print(f"  SOLUTION={target} python -m pytest -x --tb=short tests/exercises/build_{which}.py")
    print("in a clone of the repository. It stops at the first check that fails, and says why.")
