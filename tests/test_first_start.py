"""The first start on a machine: kernels are compiled by another process, and nobody waits."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

numba = pytest.importorskip("numba")

from nanovllm.cpu import compile  # noqa: E402

ANSWER = """
from nanovllm import LLM
llm = LLM(dtype="float32", device="cpu")
question = [{"role": "user", "content": "What is 34 + 58?"}]
print(llm.chat(question, use_tqdm=False)[0].outputs[0].text)
print(type(llm.engine.runner.attention).__name__)
"""


def start(cache: Path, code: str = ANSWER, **environment: str) -> tuple[list[str], str]:
    """The lines that a new process prints, and its log."""
    variables = os.environ | {"NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_first_start_answers_while_kernels_are_compiled(tmp_path: Path) -> None:
    """Two first starts, of which one compiles, and a later one that uses what was compiled."""
    for _ in range(2):
        lines, log = start(tmp_path)
        assert lines == ["34 + 58 = 92", "PlainAttention"]
        assert log.count("compiled in the background") == 1
    deadline = time.monotonic() + 300
    while not list(tmp_path.rglob("*.compiled")):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    lines, log = start(tmp_path)
    assert lines == ["34 + 58 = 92", "NumbaAttention"]
    assert "compil" not in log


def test_each_processor_and_dtype_has_its_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {compile.marker(dtype) for dtype in (torch.float32, torch.bfloat16)}
    monkeypatch.setattr(numba.config, "CPU_NAME", "x86-64-v3")
    after = {compile.marker(dtype) for dtype in (torch.float32, torch.bfloat16)}
    assert len(before | after) == 4
    assert None not in before | after


def test_nowhere_to_keep_kernels(tmp_path: Path) -> None:
    """One line says so and what helps; the answer comes at once."""
    code = "import numba.core.caching as c; c.CacheImpl._locator_classes = []\n" + ANSWER
    lines, log = start(tmp_path, code)
    assert lines == ["34 + 58 = 92", "PlainAttention"]
    assert "set NUMBA_CACHE_DIR" in log
