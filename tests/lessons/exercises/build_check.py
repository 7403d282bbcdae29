"""What the checks of the build-it tasks share: the solution, the oracle, and plain messages."""

import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lessons import break_it
from lessons.oracle.oracle import (
    History,
    OracleRunner,
    answer,
    make_samples,
    random_actions,
    replay,
)

__all__ = ["OracleRunner", "answer", "case", "check_history", "expect", "load", "make_samples"]
__all__ += ["same"]
FAILS = "Random requests fail with your code. This is a short history of those that fail."
FAULT = "What fails after the last step of this history:"


def load(file: str, *names: str, task: str = "") -> Any:
    """Return what $SOLUTION, or `file` in that directory or the current one, defines as `names`.

    A part that engine.py does not define is in its own file beside it.
    """
    path, task = Path(os.environ.get("SOLUTION", ".")).resolve(), task or file.removesuffix(".py")
    path = path / file if path.is_dir() else path
    # pytest shows the text of a CollectError without a traceback.
    if not path.is_file():
        raise pytest.Collector.CollectError(
            f"There is no file {path}. `python -m lessons build {task}` writes {file}, and "
            f"`python -m lessons build {task} --check FILE` checks it."
        )
    module = execute(path)
    is_part = os.environ.get("MILESTONE", task) != task
    if is_part and not hasattr(module, names[0]) and (own := path.with_name(file)).is_file():
        path, module = own, execute(own)
    for name in names:
        if not hasattr(module, name):
            raise pytest.Collector.CollectError(f"{path} does not define {name}.")
    found = [getattr(module, name) for name in names]
    return found if len(names) > 1 else found[0]


def execute(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("solution", path)
    if spec is None or spec.loader is None:
        raise pytest.Collector.CollectError(f"{path} is not a Python file: its name ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # a solution may import others
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise pytest.Collector.CollectError(
            f"{path.name} imports {error.name}, and there is no {path.parent / str(error.name)}.py."
        ) from None
    finally:
        sys.path.remove(str(path.parent))
    return module


def expect(is_right: bool, message: str) -> None:
    """Fail with `message` alone, which says what was expected and what came out."""
    if not is_right:
        raise pytest.fail.Exception(message, pytrace=False) from None


@contextlib.contextmanager
def case(what: str) -> Iterator[None]:
    """Let an exception that the solution raises say in which case."""
    try:
        yield
    except Exception as error:
        error.add_note(f"It is raised for: {what}")
        raise


def same(got: object, want: object, what: str) -> None:
    """Fail unless `got` is equal to `want`. `what` says what they are."""
    expect(got == want, f"{what} should be {want!r}, but with your code it is {got!r}.")


def check_history(seed: int, make: type[History] = History, **modules: Any) -> History:
    """Run a random history on the oracle. If it fails, the message has a short one that fails."""
    history = make(seed, **modules)
    if replay(history, random_actions(seed)) is None:
        return history
    attempt = break_it.shortest(modules, range(seed, seed + 100), make)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        error = break_it.show_attempt(attempt)
    pytest.fail(f"{FAILS}\n\n{shown.getvalue().rstrip()}\n\n{FAULT} {error}", pytrace=False)
