"""Build it: small parts of an engine, and an engine that grows with them, with checks.

`python -m lessons build NAME` writes a stub with its task, and `--check FILE` checks a solution.
The milestones m1 to m6 are about one file, engine.py. The checks are tests, which need pytest.
"""

import ast
import os
import re
import signal
import subprocess
import sys
from json import dumps
from pathlib import Path

from lessons import score
from lessons.show import fill

STUBS = Path(__file__).with_name("tasks")
CHECKS = Path(__file__).parents[1] / "tests" / "lessons" / "exercises"
# Task -> its lesson, in the order in which a reader writes them.
TASKS = {
    **{"attention": "2", "cache": "3", "m1": "3", "slots": "5", "m2": "5", "step": "6", "m3": "6"},
    **{"filter": "7", "prefix": "8", "eviction": "8", "m4": "8", "preempt": "9", "m5": "9"},
    **{"policy": "9", "softmax": "10", "replay": "11", "stop": "12", "m6": "12"},
    **{"ngram": "drafts", "delta": "states"},
}
# The parts of the engine that a milestone adds. Its check runs those of all earlier ones first.
PARTS = {
    **{"m1": ["cache"], "m2": ["slots"], "m3": ["step"]},
    **{"m4": ["prefix", "eviction"], "m5": [], "m6": ["stop"]},
}
MAX_SECONDS = 60  # of the processor, for one check


def text_of(task: str) -> str:
    """Return the text of a task, which is at the top of its stub, or a paragraph of engine.py's."""
    if task not in PARTS:
        return ast.get_docstring(ast.parse((STUBS / f"{task}.py").read_text())) or ""
    found = re.search(rf"^{task} .*?(?=\n\n|\Z)", text_of("engine"), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[0]


def run(which: str | None = None, check: str | None = None, json: bool = False) -> None:
    """List the tasks, write the stub of `which`, or check the solution in the file `check`."""
    if which is None and check is None:
        for name, lesson in TASKS.items():
            title = text_of(name).splitlines()[0]
            if name in PARTS:  # the first sentence
                text = " ".join(text_of(name).split()).partition("). ")[2]
                title = f"engine.py: {text.partition('. ')[0]}."
            print(fill(title, f"{name:10}{lesson:8}", " " * 18))
        print(
            "The number is the lesson. `python -m lessons build NAME` writes a file for the task."
        )
    elif which not in TASKS:
        raise ValueError(f"unknown task {which!r}; the tasks are {', '.join(TASKS)}")
    elif check is None:
        write(which)
    elif json:
        print(dumps(result_of(which, check)))
    else:
        run_checks(which, check)
        score.record("task", which)
        print(f"All checks of {which} pass.")


def result_of(task: str, file: str) -> dict[str, object]:
    """Check a file -> {"task", "passed", "output"}: the output is what `--check` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "lessons", "build", task, "--check", file],
        capture_output=True,
        text=True,
        check=False,
    )
    return {"task": task, "passed": done.returncode == 0, "output": done.stdout + done.stderr}


def write(task: str) -> None:
    """Copy the stub of a task into the current directory. A later milestone only has a text."""
    target = Path("engine.py" if task in PARTS else f"{task}.py").resolve()
    if task not in PARTS or task == "m1":
        if target.exists():
            raise FileExistsError(f"{target} exists and is not overwritten; rename it")
        target.write_text((STUBS / target.name).read_text())
        print(f"{target} is written. The text at its top is the task. To check your solution, run")
    else:
        print(text_of(task), "\nGo on in your engine.py. To check it, run", sep="\n")
    print(f"  python -m lessons build {task} --check {target}")


def files_of(task: str) -> list[str]:
    """Return the files of the checks of a task, the simplest first."""
    every = list(PARTS)
    earlier = every[: every.index(task) + 1] if task in PARTS else []
    names = [part for milestone in earlier for part in PARTS[milestone]]
    return [f"build_{name}.py" for name in [*names, "engine" if earlier else task]]


def run_checks(name: str, file: str, **variables: str) -> None:
    """Run the checks of a task on `file`, and print. Exits with pytest's status if one fails.

    They run in another process, which a wrong pointer of a kernel can end.
    """
    short = ["-xqrN", "--tb=short", "--no-header", "--show-capture=stdout", "-n0", "--noconftest"]
    plugins = ["-p", __name__, "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    command = [sys.executable, "-m", "pytest", *short, *plugins]
    command += [str(CHECKS / each) for each in files_of(name)]
    variables |= {"SOLUTION": str(Path(file).resolve()), "MILESTONE": name}
    environment = os.environ | variables
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
