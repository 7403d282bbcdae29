"""Decode steps as CUDA graphs: the launches of a step are captured once and replayed by one call.

DecodeGraphs owns a graph for each of a few batch sizes, and the tensors at fixed addresses that the
graphs read and write. A batch is padded to the next captured size with row N, the padding row of
Rows.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from nanovllm.models.batch import longest_first
from nanovllm.models.transfers import to_device
from nanovllm.utils.log import logger, progress_bar

# Of device memory. Steps that are not captured may need it, and so may other threads' libraries.
MIN_FREE_BYTES = 128 << 20
Graph = TypeVar("Graph")
# Takes the function to capture and returns the function that replays it.
Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes to capture: dense where padding is a large share, and the maximum itself."""
    sizes = [1, 2, 4, 8, *range(16, 512, 16), *range(512, max_num_seqs, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


# torch returns this many streams in turn, and then the same ones again.
NUM_STREAMS = 32
# The streams of living engines. A graph that is freed frees the cuBLAS workspaces of its stream.
# Graphs of another engine on this stream would still use them (pytorch/pytorch#193402).
_streams: WeakSet[torch.cuda.Stream] = WeakSet()
_streams_lock = threading.Lock()


def unused_stream() -> torch.cuda.Stream:
    """Return a stream of the current device on which no living engine captures.

    It stays reserved while it is referenced.
    """
    with _streams_lock:
        for _ in range(NUM_STREAMS):
            stream = torch.cuda.Stream()
            if stream not in _streams:
                _streams.add(stream)
                return stream
    raise ValueError(
        f"at most {NUM_STREAMS} engines of a process can capture CUDA graphs on one GPU; delete "
        "others, or set enforce_eager=True"
    )


class CudaCapture:
    """A Capture whose graphs share one memory pool, because only one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = unused_stream()

    @contextmanager
    def graph(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture the launches of the `with` block."""
        graph = torch.cuda.CUDAGraph()
        place = self.pool, self.stream
        # In thread-local mode other threads may use the device during a capture.
        with torch.cuda.graph(graph, *place, capture_error_mode="thread_local"):
            yield graph

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        function()  # compiles kernels and initializes libraries, which a capture must not do
        torch.cuda.synchronize()
        with self.graph() as graph:
            function()
        return graph.replay


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable Python's garbage collector, which could free a graph and thus break a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture_sizes(
    what: str,
    sizes: list[int],
    device: torch.device,
    min_over_ranks: Callable[[int], int],
    capture: Callable[[int], Graph],
) -> dict[int, Graph]:
    """Return `capture(size)` of each size, while captures succeed and memory lasts.

    The largest size comes first: its memory in the pool is enough for all others, and any step can
    be padded to it. `min_over_ranks` returns the minimum of a number over all ranks. The steps of
    ranks wait for each other, so all ranks capture the same sizes.
    """
    graphs: dict[int, Graph] = {}
    start = time.perf_counter()

    def warn(problem: str) -> None:
        logger.warning(
            f"CUDA graphs hold {what} for {len(graphs)} of {len(sizes)} sizes, and others take "
            f"longer: {problem}"
        )

    with without_collector():
        for size in progress_bar(f"Capturing {what}", "size", sorted(sizes, reverse=True)):
            is_cuda = device.type == "cuda"  # not in tests
            is_full = is_cuda and torch.cuda.mem_get_info(device)[0] < MIN_FREE_BYTES
            if not min_over_ranks(int(not is_full)):
                warn(f"the memory of {'the' if is_full else 'another'} GPU is nearly full")
                return graphs
            try:
                graph = capture(size)
            except Exception as error:  # of torch, CUDA or a library
                if is_cuda:
                    torch.cuda.synchronize(device)  # raises an error that no later step survives
                warn(f"{error!r:.300}")
                min_over_ranks(0)
                return graphs
            if not min_over_ranks(1):
                warn("the next size failed on another rank")
                return graphs
            graphs[size] = graph
    seconds = time.perf_counter() - start
    logger.info(f"captured {what} for {len(graphs)} sizes up to {max(sizes)} in {seconds:.1f} s")
    return graphs


class DecodeGraphs:
    def __init__(
        self,
        decode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        positions: np.ndarray,
        device: torch.device,
        capture: Callable[[], Capture],
        min_over_ranks: Callable[[int], int] = int,
    ) -> None:
        """Capture decode: (rows [S], order [S]) -> (hidden [S, E], tokens [S]).

        `positions` [N + 1] of the rows are on the host. Row N is padding, at position 0.
        `min_over_ranks` is the function of `capture_sizes`.
        """
        num_rows = len(positions) - 1
        self.padding_row = num_rows
        self.positions = positions
        # [2, N] int64: the rows of a batch, and its indices in the order of `longest_first`.
        self.rows = torch.full((2, num_rows), num_rows, dtype=torch.int64, device=device)
        self.rows[1] = torch.arange(num_rows, device=device)
        # The content of self.rows without padding; None if it is not known.
        self.decode_rows: list[int] | None = None
        self.size = 0
        self.capture = capture()  # kept with the graphs, because it owns their stream
        self.min_over_ranks = min_over_ranks
        # The results of each size are kept: other graphs of the pool must not use their memory.
        self.results: dict[int, tuple[Tensor, Tensor]] = {}

        def step(size: int) -> None:
            self.results[size] = decode(*self.rows[:, :size])

        # Empty if no size could be captured.
        sizes = batch_sizes(num_rows)
        self.replays = capture_sizes(
            "decodes", sizes, device, min_over_ranks, lambda size: self.capture(partial(step, size))
        )

    def replay(self, decode_rows: list[int]) -> tuple[Tensor, Tensor]:
        """Decode rows. Returns hidden states [S, E], tokens [S], valid until the next replay."""
        num = len(decode_rows)
        if decode_rows != self.decode_rows:
            self.decode_rows = None  # the copy may fail, also after it has changed them
            self.size = next(size for size in sorted(self.replays) if size >= num)
            padded = np.array(decode_rows + [self.padding_row] * (self.size - num))
            rows = np.stack((padded, longest_first(self.positions[padded])))
            self.rows[:, : self.size] = to_device(rows, self.rows.device)
            self.decode_rows = decode_rows
        self.replays[self.size]()
        hidden, tokens = self.results[self.size]
        return hidden[:num], tokens[:num]
