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
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from nanovllm import __version__
from nanovllm.utils.child import python
from nanovllm.utils.host import available_cores

MARK = "nanovllm check: "
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


def run_table(command: Callable[[int], list[str]]) -> int:
    """Print a row for each kernel as it ends. Returns the exit status.

    `command(start)` is the command of a process that runs all rows from number `start`. It prints
    MARK and a message in JSON, on one line. Libraries print other lines.
    """
    start = 0
    right = 0
    bad = []
    done = False
    while not done:
        first = start
        row = "the process"
        printed = deque[str](maxlen=20)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command(start), text=True, errors="replace", **pipes) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if not line.startswith(MARK):
                        printed.append(line.rstrip())
                        continue
                    message = json.loads(line.removeprefix(MARK))
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
                status = process.wait()
            finally:
                process.kill()  # after Ctrl-C
        if not done and row:  # otherwise a failure that has been printed ended it
            problem = [f"FAILED\n    the process ended with status {status}", *printed]
            print("\n    ".join(problem), flush=True)
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
