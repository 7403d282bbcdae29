"""Chooses the number of threads of a CPU step: one for each core that other processes leave free.

A parallel region ends when its slowest thread does. If a thread waits for a core that another
process occupies, all others wait for it and spin: with one busy process on two cores, two threads
are up to thirty times slower than one. Linux counts how long each thread was ready to run and
waited for a core. This ignores a process with a low priority, because no thread waits for it.
"""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from nanovllm.utils.host import available_cores, quota

# Seconds between two measurements. Linux counts in units of 10 ms.
INTERVAL = 0.1
# So many seconds after the limit was lowered, one more thread is tried for an interval.
DELAY = 4.0


class Clocks(NamedTuple):
    """Readings of clocks, or differences between two readings, in seconds.

    All but `time` are sums over cores or threads.
    """

    time: float
    idle: float  # of the cores
    used: float  # by this process
    waited: float  # by threads of this process that were ready to run

    def since(self, start: "Clocks") -> "Clocks":
        return Clocks(*(now - then for now, then in zip(self, start, strict=True)))


class ThreadLimit:
    """Limits the threads of torch and of the kernels while a step runs.

    The upper limit is OMP_NUM_THREADS or torch.set_num_threads. Threads without a free core would
    only spin.
    """

    def __init__(self) -> None:
        self.cores = available_cores()
        # Affects this thread only; torch.set_num_threads also affects threads that start later.
        # Without the accounting of Linux, nothing is limited.
        library = ctypes.CDLL(None) if Path("/proc/self/schedstat").is_file() else None
        self.set_num_threads: Any = getattr(library, "omp_set_num_threads", None)
        self.most = quota(len(self.cores))
        self.max_threads = min(self.most, torch.get_num_threads())
        self.limit = 1  # until the first measurement
        self.running = False
        self.next_trial = time.monotonic() + DELAY
        self.last = self.read_clocks() if self.set_num_threads else Clocks(0, 0, 0, 0)

    def read_clocks(self) -> Clocks:
        times = enumerate(psutil.cpu_times(percpu=True))
        idle = sum(core.idle + core.iowait for i, core in times if i in self.cores)
        return Clocks(time.monotonic(), idle, time.process_time(), waited_seconds())

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = torch.get_num_threads()
        if self.set_num_threads is None or before == 1:
            yield
            return
        self.max_threads = min(self.most, before)
        self.limit = min(self.limit, self.max_threads)
        self.running = True
        try:
            self.adjust()
            self.set_num_threads(self.limit)
            yield
        finally:
            self.set_num_threads(before)
            self.running = False

    def adjust(self) -> None:
        """Change the threads of a running step if the last measurement was INTERVAL ago.

        A measurement at the start of a step contains the time since the end of the step before.
        """
        if not self.running or time.monotonic() - self.last.time < INTERVAL:
            return
        now = self.read_clocks()
        self.set_limit(now.since(self.last))
        if self.limit < self.max_threads and now.time > self.next_trial:
            # A process with a low priority keeps a core busy, but leaves it to a thread that needs
            # it. The next measurement shows whether the thread waits.
            self.limit += 1
        self.last = now
        self.set_num_threads(self.limit)

    def set_limit(self, past: Clocks) -> None:
        """Set the limit from how the clocks advanced with the present limit."""
        # With n - 1 threads, the work takes n / (n - 1) times as long, but no thread waits.
        if self.limit > 1 and past.waited * self.limit > past.time:
            self.limit = max(1, self.limit - max(1, round(past.waited / past.time)))
            self.next_trial = time.monotonic() + DELAY
        else:
            free = round((past.idle + past.used) / past.time)
            self.limit = max(self.limit, min(self.max_threads, free))


def waited_seconds() -> float:
    """Return how long threads of this process were ready to run without a core; 0 if unknown."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError, IndexError):  # a thread that has ended, a kernel without the file
            total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9
