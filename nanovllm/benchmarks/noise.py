"""Neighbours: how much of the machine other processes took while something was measured.

A second busy process makes torch on two cores up to ten times slower, so no figure stands without this.
"""

import os
from collections.abc import Sequence
from pathlib import Path

LIMIT = 0.03  # share of the machine beyond which a figure is marked as noisy
TICK = os.sysconf("SC_CLK_TCK")


class Neighbours:
    """Given: the processes that belong to the benchmark beside this one. Measures from its making on."""

    def __init__(self, own: Sequence[int] = ()) -> None:
        self.own = own
        self.start = self._read()

    def share(self) -> float | None:
        """Of the machine's CPU time since the start; None where the system does not tell."""
        (busy, total, mine), (busy0, total0, mine0) = self._read(), self.start
        if total <= total0:
            return None
        return max(0.0, (busy - busy0) - (mine - mine0)) / (total - total0)

    def _read(self) -> tuple[float, float, float]:
        """Seconds of CPU so far: the machine's busy ones, all of them, and our own."""
        try:
            fields = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        except OSError:
            return 0.0, 0.0, 0.0
        idle = fields[3] + fields[4]
        times = os.times()
        mine = sum(times[:4]) + sum(map(cpu_seconds, self.own))  # with children that have ended
        return (sum(fields) - idle) / TICK, sum(fields) / TICK, mine


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICK


def is_noisy(share: float | None) -> bool:
    return share is not None and share > LIMIT


def verdict(share: float | None) -> str:
    if share is None:
        return "unknown here"
    return f"{share:.1%} of the machine{', noisy' if is_noisy(share) else ''}"
