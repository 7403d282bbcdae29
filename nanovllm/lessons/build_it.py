"""Build it: small parts of an engine, with checks. `build NAME` copies a stub with its task."""

import ast
from pathlib import Path

from nanovllm.lessons.show import fill

STUBS = Path(__file__).with_name("tasks")
# The first three tasks come with lessons 2, 3 and 6; the last three change the engine.
TASKS = ("cache", "slots", "prefix", "step", "softmax", "policy", "eviction", "filter")
CHECK = "SOLUTION={} python -m pytest -x --tb=short tests/lessons/exercises/build_{}.py"


def write(which: str | None) -> None:
    """Copy the stub of a task into the current directory, or list the tasks.

    Raises ValueError for an unknown task, FileExistsError if there is such a file already.
    """
    if which is None:
        for name in TASKS:
            text = ast.get_docstring(ast.parse((STUBS / f"{name}.py").read_text())) or ""
            print(fill(text.splitlines()[0], name.ljust(10), " " * 10))
        print("\n`nanovllm lessons build NAME` writes NAME.py into this directory.")
        return
    if which not in TASKS:
        raise ValueError(f"unknown task {which!r}; the tasks are {', '.join(TASKS)}")
    target = Path(f"{which}.py").resolve()
    stub = (STUBS / target.name).read_text()
    # The end of the docstring.
    check = f"In a clone of the repository:\n  {CHECK.format(target.name, which)}"
    stub = stub.replace('\n"""\n', f'\n\n{check}\n"""\n', 1)
    try:
        with target.open("x") as file:
            file.write(stub)
    except FileExistsError:
        raise FileExistsError(
            f"{target} exists and is not overwritten; rename it, or work in another directory"
        ) from None
    print(f"{target} is written. The text at its top is the task. To check your solution, run")
    print(f"  {CHECK.format(target, which)}")
    print("in a clone of the repository. It stops at the first check that fails, and says why.")
