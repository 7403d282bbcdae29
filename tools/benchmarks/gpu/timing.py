"""Times calls on a GPU in a CUDA graph, so that the host's work for a launch costs nothing."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

# The inputs of all calls together are larger than the L2 cache of any GPU.
COLD_BYTES = 512 << 20
# A graph starts in some microseconds, which count for all calls in it.
MIN_CALLS = 16
REPLAYS = 10
DEVICE = torch.device("cuda", 0)


def data(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return normally distributed numbers on the GPU."""
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def copies(num_bytes: int) -> int:
    """Return how many inputs of a call are needed for COLD_BYTES, at most 1,024."""
    return min(1024, -(-COLD_BYTES // num_bytes))


def capture(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """Return a graph of the calls, after each of them has run, which compiles kernels."""
    for call in dict.fromkeys(calls):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def seconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the median time of a call over replays of a graph, or NaN if memory is short.

    It may be the memory of the GPU, or the shared memory of a program.
    """
    calls = list(calls) * -(-MIN_CALLS // len(calls))
    try:
        graph = capture(calls)
        graph.replay()
        events = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
    except (torch.OutOfMemoryError, OutOfResources):
        return float("nan")
    return median(start.elapsed_time(end) for start, end in events) / 1e3 / len(calls)
