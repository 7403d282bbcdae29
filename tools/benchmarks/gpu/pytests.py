"""Runs parts of `pytest -m gpu` at the same time: most of a kernel's test is its compilation."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic

from nanovllm.utils.child import python
from tools.benchmarks.gpu.rows import Row, headline

ROOT = Path(__file__).parents[3]
TESTS = ["tests/backends/gpu", "-m", "gpu"]
# One -v undoes the -q of pyproject.toml.
COMMAND = [*python("import pytest; raise SystemExit(pytest.main())"), *TESTS, "-vv", "-rs"]


def rows(selections: list[str], limit: float) -> Iterator[Row]:
    """Run pytest once for each selection (`-k`), all at the same time, and yield how each ended.

    Also print what they print. After `limit` seconds those that still run are stopped. Raises
    SystemExit at the end if one failed.
    """
    end = monotonic() + limit
    with ExitStack() as stack:
        runs = []
        for selection in selections:
            file = stack.enter_context(TemporaryFile("w+"))
            command = [*COMMAND, "-k", selection]
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
            stack.callback(process.wait)
            stack.callback(process.kill)
            runs.append((selection, process, file))
        for selection, process, file in runs:
            result = ""
            try:
                process.wait(max(0.0, end - monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                result = f"stopped after {limit:.0f} s at "
            file.seek(0)
            printed = file.read().strip()
            print(printed, flush=True)
            result += printed.rpartition("\n")[2].strip("= ")
            yield headline({"tests": selection, "result": result})
        if any(process.returncode for _, process, _ in runs):
            raise SystemExit(1)
