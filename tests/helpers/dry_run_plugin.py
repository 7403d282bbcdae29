"""A plugin of pytest that runs the tests for a GPU on the model of one in dry_run.py.

    PYTHONPATH=tests/helpers:.ci pytest -n 0 -p dry_run_plugin -m gpu tests/backends/gpu

At the end it prints how many variants of kernels each file would compile.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import dry_run
import pytest

dry_run.replace_device()
VARIANTS: Counter[str] = Counter()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = len(dry_run.GPU.variants)
    gc.freeze()  # conftest.py has collected what the test before has left
    with dry_run.GPU:
        yield
    VARIANTS[item.path.name] += len(dry_run.GPU.variants) - before


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for name, number in VARIANTS.items():
        terminalreporter.write_line(f"{name}: {number} variants")
