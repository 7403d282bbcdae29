"""Describes the machine, and measures the CPU time of other processes."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from nanovllm.utils.child import python
from nanovllm.utils.host import available_cores

if TYPE_CHECKING:
    import torch


def cpu_seconds() -> tuple[float, float]:
    """Return CPU seconds since boot: of the machine, idle time included, and of other processes."""
    machine = psutil.cpu_times()
    ours = 0.0  # seconds of this process and its children
    # On Linux, the first eight fields include the time of the others.
    total = sum(machine[:8])
    process = psutil.Process()
    for p in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            ours += sum(p.cpu_times()[:4])
    return total, total - machine.idle - getattr(machine, "iowait", 0.0) - ours


def other_load(since: tuple[float, float]) -> float:
    """Return the share of the machine's CPU time that other processes took.

    since: an earlier result of `cpu_seconds`. A second busy process makes torch on two cores up to
        ten times slower.
    """
    total, others = (now - then for now, then in zip(cpu_seconds(), since, strict=True))
    return max(0.0, others) / total if total else 0.0


def describe_load(share: float) -> str:
    return f"{share:.1%}{' (noisy)' if share > 0.03 else ''}"


def peak_memory() -> int:
    """Return the largest number of bytes that this process has had in memory."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def busy_process() -> Iterator[None]:
    """Run another process, which uses one core, while the block runs."""
    with subprocess.Popen(python("while True: pass")) as process:
        try:
            time.sleep(0.3)  # the process needs time to start
            yield
        finally:
            process.kill()


def commit() -> str:
    """Return the commit of this clone, or "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with suppress(OSError):
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip() or "unknown"
    return "unknown"


def describe(device: torch.device) -> dict[str, Any]:
    """Return the hardware, the versions of packages, the commit and the date."""
    import torch

    packages = ("nanovllm", "torch", "transformers", "triton", "numba")
    cpuinfo = Path("/proc/cpuinfo")
    cpu = cpuinfo.read_text().partition("\n\n")[0] if cpuinfo.exists() else ""
    name = re.search(r"model name\s*: (.*)", cpu)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "CPU": name[1] if name else platform.processor() or platform.machine(),
        "bf16 instructions": " ".join(re.findall(r"\b\w+_bf16\b", cpu)) or "none",
        "cores": len(available_cores()),
        "threads": torch.get_num_threads(),
        "GiB": psutil.virtual_memory().total >> 30,
        "Python": platform.python_version(),
        **{d.name: d.version for d in distributions() if d.name in packages},
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
