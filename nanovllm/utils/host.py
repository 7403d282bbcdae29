"""The memory, the cores and the instructions that this process may use, also in a container."""

import os
from pathlib import Path

# Where Linux shows the limits of a container. No such files exist on other systems.
CONTROL_GROUP = Path("/sys/fs/cgroup")


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
