"""The card, its driver and power limit, the machine, the versions and the commit."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress

from tools.benchmarks import machine
from tools.benchmarks.gpu.rows import Row, headline
from tools.benchmarks.gpu.timing import DEVICE

QUERY = "name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,memory.total"


def rows() -> Iterator[Row]:
    """Yield one row of the machine, and one of the card if there is nvidia-smi."""
    about = machine.describe(DEVICE)
    yield headline({"machine": ", ".join(f"{key} {value}" for key, value in about.items())})
    with suppress(OSError):
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True)
        yield headline({"card": done.stdout.strip() or done.stderr.strip()})
