"""Decode as CUDA graphs: the launches of a whole step, recorded once and replayed by one call.

Owns: a graph for each of a few batch sizes, and the device's copy of the rows: block tables,
positions and sampling parameters live there and advance there, so that a steady step needs nothing
from the host but the call. Given: plans, and the host's row buffers, for what has changed. Mutates:
the KV cache, its own rows and the row buffers' last tokens.

    rows   [ 4 | 0 | 7 | N ]     a batch of 3 in the graph of 4: the last place is padding
             |   |   |   `--- row N is nobody's: its blocks are the null block, its position stays 0
             v   v   v
    token, position, block table, sampling of each row -> model -> sampler -> token of each row

What a graph reads and writes has fixed addresses: the tensors made in `__init__`.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm.plan import StepPlan
from nanovllm.runner.batch import ForwardBatch, RowBuffers, SamplingBatch, send

logger = logging.getLogger("nanovllm")

# What is captured: hidden states [S, E] and tokens [S] of a decode batch.
Decode: TypeAlias = Callable[[ForwardBatch, SamplingBatch], tuple[Tensor, Tensor]]
# Takes what is to be recorded, returns what replays it.
Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The sizes captured: dense where a padding row costs a large share, and the largest itself."""
    sizes = [1, 2, 4, 8, *range(16, 512, 16), *range(512, max_num_seqs, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class CudaCapture:
    """Records a function on a CUDA stream. All graphs share one memory pool: only one runs."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        function()  # compiles kernels and sets up libraries, which a recording must not do
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # A stream of its own: torch keeps one for the process, on the device that captured first.
        mode = "thread_local"  # what other threads do on the device is none of ours
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode=mode):
            function()
        return graph.replay


class DecodeGraphs:
    def __init__(self, rows: RowBuffers, hidden: Tensor, decode: Decode, capture: Capture) -> None:
        """`hidden` [N, E] takes the hidden states of a replay: N = rows.num_rows."""
        num, device = rows.num_rows, rows.device
        self.last_tokens, self.block_size = rows.last_tokens, rows.block_size
        # What a replay reads of each row; row N is padding.
        self.block_tables = torch.zeros(
            (num + 1, rows.max_blocks), dtype=torch.int32, device=device
        )
        self.positions = torch.zeros(
            num + 1, dtype=torch.int64, device=device
        )  # the next to compute
        self.sampling = torch.zeros((4, num + 1), dtype=torch.float32, device=device)
        self.sampling[2] = 1.0  # top_p: off
        self.seeds = torch.zeros(num + 1, dtype=torch.int64, device=device)
        self.rows = torch.full((num,), num, dtype=torch.int64, device=device)  # of the batch
        # What a replay writes.
        self.hidden = hidden
        self.tokens = torch.zeros(num, dtype=torch.int64, device=device)

        self.counting = torch.arange(num + 1, dtype=torch.int32, device=device)
        self.decode_rows: list[int] = []  # those in self.rows
        self.size = 0  # of the batch that self.rows was filled for
        self.replays: dict[int, Callable[[], None]] = {}
        start, before = time.perf_counter(), memory_in_use(device)
        # The largest first: what it needed of the pool is enough for all others.
        bar = tqdm(batch_sizes(num)[::-1], desc="Capturing graphs", unit="graph", delay=1)
        with bar as sizes, no_collection():
            for size in sizes:
                self.replays[size] = capture(lambda size=size: self._step(size, decode))  # type: ignore[misc]
        logger.info(
            "decode captured for %d batch sizes up to %d in %.1f s, %.0f MiB",
            len(self.replays), num, time.perf_counter() - start,
            (memory_in_use(device) - before) / 2**20,
        )  # fmt: skip

    def apply(self, plan: StepPlan, rows: RowBuffers) -> None:
        """Take over what the plan has changed in `rows`."""
        if plan.joins:
            joined = [join.row for join in plan.joins]
            at = send(np.array(joined), rows.device)
            self.block_tables[at] = send(rows.block_tables[joined], rows.device)
            self.sampling[:, at] = send(rows.sampling[:, joined].astype(np.float32), rows.device)
            self.seeds[at] = send(rows.seeds[joined], rows.device)
        if plan.new_blocks:
            row, index, block = send(np.array(plan.new_blocks).T.copy(), rows.device)
            self.block_tables[row, index] = block.int()

    def moved(self, plan: StepPlan, rows: RowBuffers) -> None:
        """A step ran without a graph: its rows are where the host says."""
        which = np.array([*(chunk.row for chunk in plan.chunks), *plan.decode_rows])
        self.positions[send(which, rows.device)] = send(rows.positions[which], rows.device)

    def replay(self, decode_rows: list[int]) -> tuple[Tensor, Tensor]:
        """Compute one token of each row: views of hidden states [S, E] and tokens [S], which the
        next replay overwrites."""
        num = len(decode_rows)
        if decode_rows != self.decode_rows:
            size = next(size for size in sorted(self.replays) if size >= num)
            padding = [len(self.rows)] * (size - num)
            self.rows[:size] = send(np.array([*decode_rows, *padding]), self.rows.device)
            self.decode_rows, self.size = decode_rows, size
        self.replays[self.size]()
        return self.hidden[:num], self.tokens[:num]

    def _step(self, size: int, decode: Decode) -> None:
        """What is captured: one step of the rows self.rows[:size]."""
        rows = self.rows[:size]
        self.positions[-1:].zero_()  # padding stays in slot 0 of the null block
        at = self.positions[rows]
        context_lens = at + 1
        self.positions[rows] = context_lens
        block_tables = self.block_tables[rows]
        block = block_tables.gather(1, (at // self.block_size)[:, None])[:, 0]
        batch = ForwardBatch(
            input_ids=self.last_tokens[rows],
            positions=at,
            slots=block.long() * self.block_size + at % self.block_size,
            query_start=self.counting[: size + 1],
            context_lens=context_lens,
            block_tables=block_tables,
            logit_rows=self.counting[:size],
            num_decodes=size,
        )
        temperature, top_k, top_p, min_p = self.sampling[:, rows]
        sampling = SamplingBatch(
            temperature=temperature,
            top_k=top_k.long(),
            top_p=top_p,
            min_p=min_p,
            seeds=self.seeds[rows],
            positions=context_lens,
            # Which filters the rows will ask for is not known when this is recorded.
            all_greedy=False,
            any_top_k=True,
            any_top_p=True,
            any_min_p=True,
        )
        hidden, tokens = decode(batch, sampling)
        self.hidden[:size] = hidden
        self.tokens[:size] = tokens
        self.last_tokens[rows] = tokens


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's collector at rest: another engine's graphs, freed in a capture, would break it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def memory_in_use(device: torch.device) -> int:
    """Bytes of the device that anyone uses; 0 where there is no telling."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
