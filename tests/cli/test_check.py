"""The command `nanovllm check`."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import fresh
import psutil
import pytest
import torch

from nanovllm.backends.gpu import graphs
from nanovllm.cli import check
from nanovllm.utils.child import python

pytest.importorskip("numba")

from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.cli import check_cases

CPU = torch.device("cpu")
CHILD = """import faulthandler, json, os, time
def send(**message): print("nanovllm check: " + json.dumps(message), flush=True)
send(about="a processor")
def row(number, run):
    if number >= START:
        send(begin=number, kernel=f"kernel {number}", format="bfloat16")
        run()
"""
ROWS = """
row(0, lambda: send(result="right", error=1e-3, seconds=2e-3, rate=5e8, unit="GB/s", share=0.5))
row(1, lambda: os._exit(3))
row(2, lambda: faulthandler.dump_traceback_later(0.1, exit=True) or time.sleep(100))
row(3, lambda: send(result="WRONG", why="2 rows: the relative error is 0.5"))
row(4, lambda: send(result="right", error=0.0))
send(done=True)
"""


def test_a_crash_and_a_hanging_row_are_reported_and_the_others_run(capsys) -> None:
    assert check.run_table(lambda start: python(f"START = {start}\n{CHILD}{ROWS}")) == 1
    shown = capsys.readouterr().out
    assert shown.count("a processor") == 1
    lines = shown.splitlines()
    rows = [line.split() for line in lines if line.startswith("kernel ")][1:]
    assert [row[3] for row in rows] == ["right", "FAILED", "FAILED", "WRONG", "right"]
    assert rows[0][4:] == ["1.0e-03", "2,000", "us", "0.5", "GB/s", "50%"]
    assert "    the process ended with status 3" in lines
    assert "    the process ended with status 1" in lines
    assert "    Timeout (0:00:00.100000)!" in lines
    assert "rows that are right: 2; rows that are wrong or have failed: 3\n(" in shown


def test_a_failure_that_ends_the_process_is_one_failure(capsys) -> None:
    """As after an illegal access of memory on a GPU."""
    rows = """
row(0, lambda: (send(result="FAILED", why="illegal access"), time.sleep(0.1), 1 / 0))
row(1, lambda: send(result="right", error=0.0))
send(done=True)
"""
    assert check.run_table(lambda start: python(f"START = {start}\n{CHILD}{rows}")) == 1
    shown = capsys.readouterr().out
    assert "are right: 1; rows that are wrong or have failed: 1\n(kernel 0 in bfloat16)" in shown
    assert "ZeroDivisionError" not in shown


def test_words_of_rows(capfd: pytest.CaptureFixture[str]) -> None:
    """All words of --only are in a row, in upper or lower case. Without such a row: the names."""
    assert check.main(["--only", "FLOAT32", "foo"]) == 2
    shown = capfd.readouterr()
    assert "kernel  " not in shown.out
    wanted = "error: no row has 'FLOAT32' and 'foo'; kernels: add_rms_norm; silu_and_mul; "
    assert shown.err.startswith(wanted)
    assert "float32, int4" in shown.err
    assert check.main(["--only", "FLOAT32", "silu"]) == 0
    assert "silu_and_mul     float32           right" in (shown := capfd.readouterr().out)
    assert "rows that are right: 1; rows that are wrong or have failed: 0" in shown


@pytest.mark.parametrize(("compiler", "shown"), [("/nonexistent", " (not found)"), ("sh", "")])
def test_the_c_compiler_of_triton(compiler: str, shown: str, monkeypatch) -> None:
    """It does not search for another one if CC is set."""
    monkeypatch.setenv("CC", compiler)
    assert check.about()[-1].endswith(f"C compiler {compiler}{shown}")


LAYER = """
import torch
from nanovllm.backends.cpu import jit
from nanovllm.cli import check_cases
from nanovllm.utils.log import show_log

show_log()
assert jit.kernel_lock() is jit.kernel_lock() is jit.LOCK
print(check_cases.about(torch.device("cpu")))
"""


def test_the_threads_of_the_kernels_are_named() -> None:
    """Where Numba does not find OpenMP, its own threads run the kernels, which are slower."""
    done = fresh.run(LAYER, NUMBA_THREADING_LAYER="workqueue", TRITON_INTERPRET="0")
    assert done.stdout.rstrip().endswith(" threads (workqueue)"), done.stderr
    assert done.stderr.count("its own threads (workqueue)") == 1


def test_a_process_that_does_not_start(capsys) -> None:
    assert check.run_table(lambda start: python("import no_such_module")) == 1
    assert "ModuleNotFoundError: No module named 'no_such_module'" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for a process")
def test_an_interrupt_ends_both_processes() -> None:
    child = "import json, os, time; print('nanovllm check: ' + json.dumps({'about': os.getpid()}), flush=True)\n"
    code = (
        "import sys\nfrom nanovllm.cli import check\n"
        f"check.python = lambda code: [sys.executable, '-c', {child + 'time.sleep(100)'!r}]\n"
        "sys.exit(check.main([]))"
    )
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while not (line := process.stdout.readline()).strip().isdecimal():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert not psutil.pid_exists(int(line))


@pytest.fixture
def rows(monkeypatch) -> Callable[[bool], dict[str, Any]]:
    """A function that returns the rows with Triton's interpreter, or those of the CPU's kernels."""

    def find(interpreter: bool) -> dict[str, Any]:
        monkeypatch.setattr(check_cases, "IN_INTERPRETER", interpreter)
        monkeypatch.setattr(check_cases, "large", lambda device: 64)
        monkeypatch.setattr(check_cases, "seconds", lambda call: (call(), 1e-3)[1])
        return {f"{k} {name}": (row, dtype) for k, name, dtype, row in check_cases.cases(CPU)}

    return find


def test_a_gpu_is_timed_without_python(monkeypatch) -> None:
    """Each run is ten calls of a CUDA graph."""
    monkeypatch.setattr(graphs, "CudaCapture", lambda: lambda function: function)
    calls: list[int] = []
    item = check_cases.captured(check_cases.Timed(lambda: calls.append(1), 5.0, "TFLOP/s"))
    item.call()
    assert (len(calls), item.work, item.unit) == (10, 50.0, "TFLOP/s")


def results(rows: dict[str, Any]) -> dict[str, dict[str, Any]]:
    with torch.inference_mode():
        return {name: check_cases.result(*row, CPU) for name, row in rows.items()}


@pytest.mark.slow
def test_all_kernels_of_the_cpu_are_right(rows: Callable[[bool], dict[str, Any]]) -> None:
    found = results(rows(False))
    assert len(found) == 32
    for name, message in found.items():
        assert message["result"] == "right", (name, message)
        assert message["rate"] > 0
        json.dumps(message)


@pytest.mark.parametrize(
    ("fault", "result"), [(1.1, "WRONG"), (float("nan"), "WRONG"), (None, "FAILED")]
)
def test_a_wrong_kernel_is_reported(
    rows: Callable[[bool], dict[str, Any]], fault: float | None, result: str, monkeypatch
) -> None:
    kernel = CpuBackend.silu_and_mul

    def wrong(x: torch.Tensor) -> torch.Tensor:
        out = kernel(x)
        if fault is None:
            raise RuntimeError("no shared memory")
        out[-1] *= fault
        return out

    monkeypatch.setattr(CpuBackend, "silu_and_mul", staticmethod(wrong))
    all_rows = rows(False)
    [message] = results({"": all_rows["silu_and_mul float32"]}).values()
    assert message["result"] == result
    assert "relative error" in message["why"] or "no shared memory" in message["why"]


@pytest.mark.parametrize(
    ("times", "share"),
    [
        ([5, 4, 4, 4.5, 9, 4], 0.5),  # the shortest times, 4 and 4
        ([4, 4, 4, 4, 4, 8], None),  # torch's differ
        ([1, 4, 1, 4, 1, 4], None),  # faster than torch's product, which cannot be
    ],
)
def test_shares_on_a_busy_machine(times: list[float], share: float | None, monkeypatch) -> None:
    """The kernel and torch's product take turns."""
    turns, half = iter(times), check_cases.Timed(list, 1024.0**3, "TFLOP/s")
    monkeypatch.setattr(check_cases, "seconds", lambda call: next(turns))
    found = check_cases.timed(half, CPU, torch.float32)
    assert found["share"] == share
    text = check.columns({"result": "right", "error": 0.0} | found)
    assert text.endswith("busy" if share is None else "50%")


def test_a_timing_that_needs_too_much_memory_is_left_out() -> None:
    def row() -> Any:
        same = torch.ones(2, 2)
        yield check_cases.Comparison("2 rows", same, same)
        raise torch.OutOfMemoryError("too large")

    message = check_cases.result(row, torch.float32, CPU)
    assert (message["result"], message["error"]) == ("right", 0.0)
    assert "not timed" in message["why"]
