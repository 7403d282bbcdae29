"""Samples the clock and the power of the GPU, on which every figure depends."""

import subprocess
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

QUERY = "nvidia-smi --query-gpu=utilization.gpu,clocks.sm,power.draw,temperature.gpu -lms 500"
FORMAT = "--format=csv,noheader,nounits"
UNITS = ("MHz", "W", "C")


class Clocks:
    """Runs nvidia-smi, if there is one, until `stop`."""

    def __init__(self) -> None:
        self.directory = TemporaryDirectory()
        self.path = Path(self.directory.name, "samples")
        self.num_read = 0  # characters
        self.process: subprocess.Popen[bytes] | None = None
        with self.path.open("w") as file, suppress(OSError):
            self.process = subprocess.Popen(
                [*QUERY.split(), FORMAT], stdout=file, stderr=subprocess.DEVNULL
            )

    def since_last_call(self) -> dict[str, float]:
        """Return medians over the samples in which the GPU was in use; {} without such a sample."""
        text, samples = self.path.read_text(), []
        for line in text[self.num_read :].splitlines():
            with suppress(ValueError):
                use, *values = map(float, line.split(","))
                samples += [values] if use > 0 and len(values) == len(UNITS) else []
        self.num_read = len(text)
        columns = zip(*samples, strict=True)
        return {unit: median(values) for unit, values in zip(UNITS, columns, strict=False)}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.directory.cleanup()
