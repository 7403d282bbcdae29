"""The memory, the cores and the instructions that this process may use, also in a container."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Linux shows the limits of a container here. No such files exist on other systems.
CONTROL_GROUP = Path("/sys/fs/cgroup")
# Parts of the messages of the RuntimeError that torch raises if an allocation fails.
OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory")
TRIAL = 5  # seconds, in which a parallel region of OpenMP ends unless it waits forever


def available_host_memory() -> int:
    """Return the bytes that can be allocated without swapping, within the container's limit."""
    import psutil  # here, because only an engine needs it

    available: int = psutil.virtual_memory().available
    try:
        limit = (CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((CONTROL_GROUP / "memory.current").read_text())
        lines = (CONTROL_GROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return available
    if limit != "max":
        # Inactive file pages belong to the page cache, which the kernel reclaims.
        used -= int(dict(line.split() for line in lines)["inactive_file"])
        available = min(available, int(limit) - used)
    return max(0, available)


@contextmanager
def explain_out_of_memory(message: str) -> Iterator[None]:
    """Raise ValueError(message) if the `with` block runs out of memory, also of a GPU."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(w in str(error) for w in OUT_OF_MEMORY):
            raise
        raise ValueError(message) from error


def available_cores() -> list[int]:
    """Return the numbers of the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):  # on Linux
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def quota(cores: int) -> int:
    """Return how many of `cores` the container may use: cpu.max of its control group."""
    try:
        limit, period = (CONTROL_GROUP / "cpu.max").read_text().split()
        return cores if limit == "max" else max(1, min(cores, -(-int(limit) // int(period))))
    except (OSError, ValueError):
        return cores


def cpu_has_fast_bf16() -> bool:
    """Return whether the CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, Arm's BF16)."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return any(f" {flag}" in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def check_fork() -> None:
    """Raise RuntimeError if this process was forked after OpenMP was used, where torch would hang.

    GNU OpenMP, which torch and Numba use on Linux, waits forever for its threads in a forked
    process, where they do not exist. Another fork tries a parallel region for at most TRIAL
    seconds.
    """
    if sys.platform != "linux":
        return
    flags = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[6])
    is_forked = flags & 0x40  # the process was forked and has not executed a program
    if not is_forked or len(os.listdir("/proc/self/task")) > 1:
        return
    import torch

    if (trial := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(TRIAL)
        torch.ones(1 << 20).exp()
        os._exit(0)
    if os.waitpid(trial, 0)[1] != 0:
        raise RuntimeError(
            "this process was forked from one that has used OpenMP (torch or another LLM), whose "
            "threads do not exist here; start it with multiprocessing.get_context('spawn')"
        )
