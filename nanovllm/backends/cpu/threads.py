"""How many threads a step on a CPU uses: as many as there are cores that other processes leave.

A parallel region ends when its slowest thread does. If a thread waits for a core that another
process occupies, all others wait for it and spin: beside one busy process, two threads on two cores
are up to ten times slower than one.
"""

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Seconds between two looks at what the cores did. The kernel counts in units of 10 ms.
INTERVAL = 0.1
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class ThreadLimit:
    """Limits torch's threads, which the CPU's kernels follow, while a step runs.

    OMP_NUM_THREADS, and a number that was set by torch.set_num_threads, are not changed.
    """

    def __init__(self) -> None:
        self.cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.limit = self.most = quota(len(self.cores))
        # For this thread alone. torch.set_num_threads also sets it for those that start later.
        library = ctypes.CDLL(None) if Path("/proc/stat").is_file() else None
        self.set_num_threads: Any = getattr(library, "omp_set_num_threads", None)
        self.chosen = "OMP_NUM_THREADS" in os.environ or self.set_num_threads is None
        self.default = torch.get_num_threads()
        self.last = self.look()

    def look(self) -> tuple[float, float, float]:
        """(time, seconds that the cores were busy, seconds of this process)."""
        busy = 0 if self.chosen else busy_ticks(Path("/proc/stat").read_text(), self.cores)
        return time.monotonic(), busy / TICKS_PER_SECOND, time.process_time()

    def update(self) -> None:
        """Count the cores that others used since the last look; half a core counts as one."""
        if time.monotonic() - self.last[0] < INTERVAL:
            return
        now = self.look()
        seconds, busy, own = (b - a for a, b in zip(self.last, now, strict=True))
        self.last = now
        free = len(self.cores) - round((busy - own) / seconds)
        self.limit = max(1, min(self.most, free))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = torch.get_num_threads()
        if self.chosen or before != self.default:
            yield
            return
        self.update()
        if self.limit >= before:
            yield
            return
        try:
            self.set_num_threads(self.limit)
            yield
        finally:
            self.set_num_threads(before)


def busy_ticks(stat: str, cores: list[int]) -> int:
    """The time that these cores were not idle, from the text of /proc/stat."""
    total = 0
    for line in stat.splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, numbers[:8])
            total += user + nice + system + irq + softirq + steal
    return total


def quota(cores: int) -> int:
    """The cores that the container may use, at most `cores`: cpu.max of its control group."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if limit == "max" else max(1, min(cores, -(-int(limit) // int(period))))
    except (OSError, ValueError):
        return cores
