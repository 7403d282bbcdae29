"""The commands of `python -m tools.gpu`."""

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec

import psutil
import pytest

import bench
from tools import gpu
from tools.gpu import STEPS, Step


def test_the_commands_exist() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        first, *rest = step.arguments
        if first == "bench.py":
            bench.check(bench.make_parser().parse_args(rest))
        elif first.endswith(".py"):
            assert (gpu.ROOT / first).exists()
        elif first == "-m" and rest[0].startswith("tools."):
            assert (gpu.ROOT / rest[0].replace(".", "/")).with_suffix(".py").exists()
        assert all((gpu.ROOT / file).exists() for file in rest if file.endswith(".py"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_measurements_for_what_is_next_run_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tools.benchmarks.next"]
    shown = subprocess.check_output(command, env=environment, cwd=gpu.ROOT, text=True)
    assert shown.count(" not timed") == 9
    assert "failed" not in shown


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no groups of processes")
def test_a_command_that_fails_or_hangs_does_not_end_the_run(tmp_path, monkeypatch, capsys) -> None:
    hang = (
        "import subprocess, sys, time\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print('other', other.pid)\ntime.sleep(100)"
    )
    steps = [
        Step("first", 60, "whether it prints", ("-c", "print('one')")),
        Step("second", 60, "whether it fails", ("-c", "1 / 0")),
        Step("third", 3, "whether it hangs", ("-c", hang)),
        Step("fourth", 60, "whether the rest runs", ("-c", "print('four')")),
    ]
    monkeypatch.setattr(gpu, "STEPS", steps)
    assert gpu.main(["--out", str(tmp_path / "out")]) == 1
    shown, log = capsys.readouterr().out, (tmp_path / "out" / "gpu.txt").read_text()
    ends = [["status", "0,"], ["status", "1,"], ["cut", "after"], ["status", "0,"]]
    for text in (shown, log):
        lines = text.splitlines()
        assert {"one", "ZeroDivisionError: division by zero", "four"} <= set(lines)
        assert [line.split()[1:3] for line in lines[-4:]] == ends
    [pid] = map(int, re.findall(r"^other (\d+)$", log, re.MULTILINE))
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    only = ["--out", str(tmp_path / "out"), "--only", "first"]
    assert gpu.main(only) == 0
    assert "four" not in capsys.readouterr().out
    # No command begins whose limit does not fit into the seconds that remain.
    assert gpu.main([*only, "third", "--seconds", "59"]) == 1
    first, third = capsys.readouterr().out.splitlines()[-2:]
    assert first.startswith("first         left out of 59 s")
    assert third.startswith("third         cut after 3 s")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no groups of processes")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_run_that_is_cut_loses_nothing(tmp_path, name: str, monkeypatch, capsys) -> None:
    """What was printed is in the file, with how the commands before have ended."""
    cut = f"import os, signal, time; os.kill(os.getppid(), signal.{name}); time.sleep(100)"
    steps = [Step("first", 60, "", ("-c", "print('one')")), Step("second", 60, "", ("-c", cut))]
    monkeypatch.setattr(gpu, "STEPS", steps)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert gpu.main(["--out", str(tmp_path)]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    log = (tmp_path / "gpu.txt").read_text()
    assert "\none\n" in log
    for text in (capsys.readouterr().out, log):
        first, end = text.splitlines()[-2:]
        assert first.startswith("first         status 0,")
        assert end == "interrupted"
