"""Compares every kernel with plain torch on this machine, and times it.

  nanovllm check                          all kernels; minutes, because most are compiled first
  nanovllm check --only bfloat16 attend   only rows that have both words in their kernel or format
  nanovllm check | tee check.txt          keeps the table, to send it with a report

"error" is the largest relative error of a row of a result. "rate" is what a kernel reads and
writes, or multiplies and adds, in a second. "of peak" compares it with torch's copy, sum or matrix
product, which take turns with it. It is "busy" if other programs change these rates.

If a kernel crashes, or takes longer than five minutes, the other rows run in a new process. The
exit status is 1 if a kernel is wrong or fails.
"""

import argparse
import json
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from nanovllm import __version__
from nanovllm.utils.child import python
from nanovllm.utils.host import available_cores

START_SECONDS = 60  # the limit of the time before the first row, in which torch is imported
HEADER = f"{'kernel':16} {'format':17} {'result':7} {'error':>7} {'time':>10} {'rate':>14} of peak"
SCALES = {"GB/s": 1e9, "TFLOP/s": 1e12}


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("nanovllm check", description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="only rows with all of these words"
    )
    only = parser.parse_args(argv).only

    def command(start: int) -> list[str]:
        return python(f"from nanovllm.cli.check_cases import main; main({start}, {only!r})")

    try:
        print("\n".join(about()), flush=True)
        return run_table(command)
    except KeyboardInterrupt:
        print("\ninterrupted")
        return 130


def about() -> list[str]:
    """Return lines about the system. The line about the GPU comes from the other process."""
    installed = []
    for name in ("torch", "triton", "numba", "llvmlite", "transformers"):
        with suppress(PackageNotFoundError):
            installed.append(f"{name} {version(name)}")
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall("model name.*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    processor = (names or [platform.processor() or platform.machine()])[0]
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "gcc"
    found = "" if shutil.which(compiler) else " (not found)"  # Triton searches as the line above
    return [
        f"nanovllm {__version__}, Python {platform.python_version()}, {platform.platform()}",
        ", ".join(installed),
        f"CPU {processor}, {len(available_cores())} cores, load {psutil.getloadavg()[0]:.1f}; "
        f"C compiler {compiler}{found}",
    ]


class Child:
    """A process that prints messages as lines of JSON."""

    def __init__(self, command: list[str]) -> None:
        self.printed = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.printed)
        self.messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.messages.put(json.loads(line))
        self.messages.put(None)  # the end

    def end(self) -> str:
        """Kill the process unless it has ended. Returns its status and the end of its stderr."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)
        self.process.kill()
        status = self.process.wait()
        with self.printed as printed:
            printed.seek(0)
            lines = printed.read().splitlines()
        return "\n    ".join([f"the process ended with status {status}", *lines[-8:]])


def run_table(command: Callable[[int], list[str]], limit: float = 300) -> int:
    """Print a row for each kernel as it ends. Returns the exit status.

    `command(start)` is the command of a process that runs all rows from number `start`, each for at
    most `limit` seconds.
    """
    start = 0
    right = 0
    bad = []
    done = False
    while not done:
        child = Child(command(start))
        first = start
        row = "the process"
        problem = ""
        try:
            while not done:
                seconds = limit if row != "the process" else max(limit, START_SECONDS)
                if (message := child.messages.get(timeout=seconds)) is None:
                    break
                if "refused" in message:
                    print(f"error: {message['refused']}", file=sys.stderr)
                    return 2
                if "about" in message and start == 0:
                    print(message["about"], HEADER, sep="\n\n", flush=True)
                elif "begin" in message:
                    start = message["begin"] + 1
                    row = f"{message['kernel']} in {message['format']}"
                    print(f"{message['kernel']:16} {message['format']:17} ", end="", flush=True)
                elif "result" in message:
                    print(columns(message), flush=True)
                    right += message["result"] == "right"
                    bad += [] if message["result"] == "right" else [row]
                    row = ""
                done = "done" in message
        except queue.Empty:
            problem = f"it took longer than {limit:g} s, and "
        finally:
            problem += child.end()
        if not done and row:  # otherwise a failure that has been printed ended it
            print(f"FAILED\n    {problem}", flush=True)
            bad.append(row)
        done |= start == first
    print(f"\nrows that are right: {right}; rows that are wrong or have failed: {len(bad)}")
    if bad:
        print(f"({'; '.join(bad)}).\nPlease report this with all of the output above.")
    return int(bool(bad))


def columns(message: dict[str, Any]) -> str:
    """Return the columns of a result."""
    error = f"{message['error']:.1e}" if message.get("error") else "0" if "error" in message else ""
    text = f"{message['result']:7} {error:>7}"
    if seconds := message.get("seconds"):
        unit = message["unit"]
        rate = message["rate"] / SCALES[message["unit"]]
        share = "busy" if message["share"] is None else f"{message['share']:.0%}"
        text += f" {1e6 * seconds:7,.0f} us {rate:6.4g} {unit:7} {share:>7}"
    return f"{text}\n    {message['why']}" if "why" in message else text.rstrip()
