"""The memory, the cores and the instructions that this process may use, also in a container."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Linux shows the limits of a container here, and in which control groups this process is. No such
# files exist on other systems.
CONTROL_GROUP = Path("/sys/fs/cgroup")
GROUPS_OF_PROCESS = Path("/proc/self/cgroup")
# Parts of the messages of the RuntimeError that torch raises if an allocation fails.
OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory")
TRIAL = 5  # seconds, in which a parallel region of OpenMP ends unless it waits forever


def available_host_memory() -> int:
    """Return the bytes that can be allocated without swapping, within the container's limit."""
    import psutil  # here, because only an engine needs it

    available: int = psutil.virtual_memory().available
    for group in control_groups("memory"):
        for names in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),  # version 1
        ):
            with suppress(OSError, ValueError):  # "max", which is no limit, is not a number
                limit, used = (int((group / name).read_text()) for name in names)
                available = min(available, limit - used + reclaimable(group))
    return max(0, available)


def reclaimable(group: Path) -> int:
    """Return the bytes of inactive file pages, the page cache that the kernel reclaims."""
    with suppress(OSError, ValueError):
        lines = (group / "memory.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in map(str.split, lines)}
        # In version 1, the first name includes the groups below this one, as the usage does.
        return stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return 0


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the control groups of versions 2 and 1 whose limits apply to this process.

    A limit of a group applies to the groups below it too. A container may see its own group as the
    root, so the directories of its path need not exist.
    """
    lines = ["0::/"]  # the roots
    with suppress(OSError):
        lines += GROUPS_OF_PROCESS.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for root in (CONTROL_GROUP / controllers, CONTROL_GROUP / controller):  # either may exist
            group = root / path.lstrip("/")
            yield from (g for g in (group, *group.parents) if g.is_relative_to(root))


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
    """Return how many of `cores` the container may use: the CPU time of its control groups."""
    for group in control_groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # or version 1
            with suppress(OSError, ValueError):  # "max", which is no limit, is not a number
                text = " ".join((group / name).read_text() for name in names)
                limit, period = map(int, text.split())
                if limit > 0:  # -1 is no limit
                    cores = max(1, min(cores, -(-limit // period)))
    return cores


def has_cpu_flag(*names: str) -> bool:
    """Return whether Linux names one of these features of the processor."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not set(names).isdisjoint(flags)


def cpu_has_fast_bf16() -> bool:
    """Return whether the CPU multiplies bfloat16 in hardware: AVX512-BF16 or AMX.

    Arm's BF16 does not count: no kernel uses it, and plain torch packs weights in each product.
    """
    return has_cpu_flag("avx512_bf16", "amx_bf16")


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
