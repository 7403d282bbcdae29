"""Compares every kernel with plain torch on this machine, and times it.

  nanovllm check                        all kernels; minutes, because most are compiled first
  nanovllm check --only bfloat16 attend only the rows with both words in their kernel or format
  nanovllm check | tee check.txt        keeps the table, to send it with a report

"error" is the largest relative error of a row of a result. "rate" is what a kernel reads and
writes, or multiplies and adds, in a second. "of peak" compares it with torch's copy or sum, or its
matrix product, on this machine. Other programs that run meanwhile lower rates and change no result.
The exit status is 1 if a kernel is wrong or fails.

The kernels run in another process. If that crashes, or a row takes longer than --limit, the row is
reported, and the rows after it run in a new process.
"""

import argparse
import json
import os
import platform
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nanovllm import __version__
from nanovllm.utils.child import python
from nanovllm.utils.host import available_cores

Message = dict[str, Any]
HEADER = f"{'kernel':16} {'format':17} {'result':7} {'error':>7} {'time':>10} {'rate':>14} of peak"
PACKAGES = "torch", "triton", "numba", "llvmlite", "transformers"
REPORT = "Please report it, with all of this output, where nanovllm comes from."


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("nanovllm check", description=__doc__, formatter_class=raw)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="see above")
    devices = "auto", "cuda", "cpu"
    parser.add_argument("--device", choices=devices, default="auto", help="(%(default)s)")
    help_limit = "of a row, with compilation (%(default)s)"
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help=help_limit)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)

    def command(start: int) -> list[str]:
        arguments = f"{start}, {args.only!r}, {args.device!r}"
        return python(f"from nanovllm.cli.check_cases import main; main({arguments})")

    try:
        print("\n".join(about()), flush=True)
        return run_table(command, args.limit)
    except KeyboardInterrupt:
        print("\ninterrupted")
        return 130


def about() -> list[str]:
    """Return lines about the system. The lines about the GPU come from the other process."""
    installed = []
    for name in PACKAGES:
        try:
            installed.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            installed.append(f"no {name}")
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    processor = (names or [platform.processor() or platform.machine()])[0]
    compilers = [os.environ.get("CC"), "gcc", "clang", "cc"]  # as Triton looks for one
    compiler = next((path for name in compilers if name and (path := shutil.which(name))), "none")
    return [
        f"nanovllm {__version__}, Python {platform.python_version()}, {platform.platform()}",
        ", ".join(installed),
        f"CPU {processor}, {len(available_cores())} cores; C compiler {compiler}",
    ]


class Child:
    """A process that prints messages as lines of JSON. It ends when its stdin is closed."""

    def __init__(self, command: list[str]) -> None:
        self.printed = tempfile.TemporaryFile()  # noqa: SIM115
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.printed, text=True
        )
        self.messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.messages.put(json.loads(line))
        self.messages.put(None)

    def read(self, limit: float) -> Message | None:
        """Return the next message, or None at the end. Raises queue.Empty after `limit` seconds."""
        return self.messages.get(timeout=limit)

    def end(self) -> tuple[int, str]:
        """Kill the process unless it has ended. Returns its status and the end of its stderr."""
        try:
            self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            self.process.kill()
        status = self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        with self.printed as printed:
            printed.seek(0)
            lines = printed.read().decode(errors="replace").splitlines()
        return status, "\n".join(f"    {line}" for line in lines[-8:])


def run_table(command: Callable[[int], list[str]], limit: float) -> int:
    """Print a row for each kernel as it ends. Returns the exit status.

    `command(start)` is the command of a process that runs all rows from number `start`.
    """
    start: int | None = 0
    peaks: dict[str, float] = {}  # of torch, by unit
    bad: list[str] = []
    num = 0
    while start is not None:
        child, current, done, problem = Child(command(start)), None, False, ""
        try:
            while not done and (message := child.read(limit)) is not None:
                if "about" in message:
                    if start == 0:
                        print(message["about"], HEADER, sep="\n\n", flush=True)
                elif "peaks" in message:
                    peaks |= message["peaks"]
                elif "begin" in message:
                    current = message
                    print(f"{current['kernel']:16} {current['format']:17} ", end="", flush=True)
                elif "result" in message:
                    assert current is not None
                    print(text(message, peaks), flush=True)
                    num += 1
                    if message["result"] not in ("right", "-"):
                        bad.append(f"{current['kernel']} {current['format']}")
                    current = None
                done = "done" in message
        except queue.Empty:
            problem = f"took longer than {limit:g} s"
        finally:
            status, printed = child.end()
        start = None
        if not done:
            problem = problem or f"the process ended with status {status}"
            if current is not None:
                start = current["begin"] + 1
                bad.append(f"{current['kernel']} {current['format']}")
            else:
                bad.append("the process of the kernels")
            print(f"FAILED: {problem}", printed, sep="\n", flush=True)
    if bad:
        print(f"\nwrong or failed: {', '.join(bad)}. {REPORT}")
        return 1
    print(f"\n{num} rows, and no kernel is wrong")
    return 0 if num else 1


def text(message: Message, peaks: dict[str, float]) -> str:
    """Return the columns of a result."""
    result, error = message["result"], message.get("error")
    columns = f"{result:7} {'' if error is None else f'{error:.1e}' if error else '0':>7}"
    if seconds := message.get("seconds"):
        unit, rate = message["unit"], message["work"] / seconds
        columns += f" {1e6 * seconds:7,.0f} us {rate / SCALES[unit]:6.4g} {unit:7}"
        if unit in peaks:
            columns += f"{rate / peaks[unit]:5.0%}"
    if why := message.get("why"):
        columns += f"\n    {why}"
    return columns.rstrip()


SCALES = {"GB/s": 1e9, "TFLOP/s": 1e12}
