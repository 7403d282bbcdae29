"""Refuses to start where OpenMP's threads are missing.

torch and Numba use GNU OpenMP. A process that is forked after its threads have started does not
have them, but its first parallel region waits for them forever.
"""

import functools
import os
import signal
import sys
from pathlib import Path

import torch

# A bit of the flags in /proc/self/stat: the process was forked and has not executed a program.
FORKED = 0x40
# A parallel region that takes longer than these seconds is considered to wait forever.
PATIENCE = 5


def check_openmp() -> None:
    """Raise RuntimeError if this process was forked from one that has used OpenMP."""
    if first_process() != os.getpid() or (is_freshly_forked() and not parallel_region_ends()):
        raise RuntimeError(
            "this process was forked from one that has used OpenMP (torch or another LLM), whose "
            "threads do not exist here; start it with multiprocessing.get_context('spawn')"
        )


@functools.cache
def first_process() -> int:
    """Return the process that made its first LLM. A process forked later inherits the answer."""
    return os.getpid()


def is_freshly_forked() -> bool:
    """Return whether this process was forked and has not started a thread."""
    if sys.platform != "linux":
        return False
    flags = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[6])
    return bool(flags & FORKED) and len(os.listdir("/proc/self/task")) == 1


def parallel_region_ends() -> bool:
    """Run a parallel region in another forked process, which inherits the state of OpenMP."""
    process = os.fork()
    if process == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
            torch.ones(1 << 20).exp()
        finally:
            os._exit(0)
    return os.waitpid(process, 0)[1] == 0
