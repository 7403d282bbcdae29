"""What the checks of the build-it tasks share: the solution, the oracle, and plain messages."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lessons.oracle.oracle import History, OracleRunner, answer, make_samples, run_history

__all__ = ["OracleRunner", "answer", "check_history", "expect", "load", "make_samples"]


def load(file: str, name: str) -> Any:
    """Return `name` from the file in $SOLUTION, or from `file` in that or the current directory."""
    path, task = Path(os.environ.get("SOLUTION", ".")).resolve(), file.removesuffix(".py")
    path = path / file if path.is_dir() else path
    if not path.is_file():
        # pytest shows the text of a CollectError without a traceback.
        raise pytest.Collector.CollectError(
            f"There is no file {path}. `python -m lessons build {task}` writes {file}, and "
            f"`python -m lessons build {task} --check FILE` checks it."
        )
    spec = importlib.util.spec_from_file_location("solution", path)
    assert spec is not None, f"{path} is not a Python file"
    assert spec.loader is not None
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
    if not hasattr(module, name):
        raise pytest.Collector.CollectError(f"{path} does not define {name}.")
    return getattr(module, name)


def expect(is_right: bool, message: str) -> None:
    """Fail with `message` alone, which says what was expected and what came out."""
    if not is_right:
        pytest.fail(message, pytrace=False)


def check_history(seed: int, **options: Any) -> History:
    """Run a random history of the scheduler and the block manager on the oracle."""
    try:
        return run_history(seed, **options)
    except AssertionError as error:
        message = f"A random run goes wrong with your rule, which no rule may cause: {error}"
    pytest.fail(message, pytrace=False)
