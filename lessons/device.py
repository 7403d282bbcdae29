"""A model of a GPU whose launches are counted, with graphs. It computes with torch on the CPU."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

Kernel = Callable[..., None]  # reads and writes the tensors that it gets


class Device:
    def __init__(self) -> None:
        self.launches = 0  # calls of the host: kernels, and graphs of many kernels
        self.compiled: set[tuple[Kernel, str]] = set()  # for which sizes of tensors
        self.recording: list[Callable[[], None]] | None = None

    def launch(self, kernel: Kernel, *tensors: Tensor) -> None:
        """Run a kernel. During a capture it is only recorded, with the addresses of its tensors."""
        sizes = " and ".join(str(tensor.numel()) for tensor in tensors)
        if self.recording is None:
            self.launches += 1
            self.compiled.add((kernel, sizes))
            kernel(*tensors)
        elif (kernel, sizes) in self.compiled:
            self.recording.append(partial(kernel, *tensors))
        else:
            raise RuntimeError(
                f"{kernel.__name__} is not compiled for tensors of {sizes} elements: launch it "
                "with such tensors before the capture"
            )

    def capture(self, step: Callable[[], object]) -> Callable[[], None]:
        """Record what `step` launches -> a function that launches all of it by one call."""
        self.recording = recorded = list[Callable[[], None]]()
        try:
            step()
        finally:
            self.recording = None

        def replay() -> None:
            self.launches += 1
            for run in recorded:
                run()

        return replay
