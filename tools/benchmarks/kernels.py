"""Measures each Triton kernel as a fraction of the GPU's copy bandwidth or matmul rate.

The calls are timed in a CUDA graph, and their inputs together are larger than the L2 cache.
Attention is also measured with torch's SDPA, which reads a contiguous KV cache with sequences of
the same lengths.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from tqdm import tqdm
from triton.runtime.errors import OutOfResources

from nanovllm.backends.gpu.kernels.attention import attend, attend_decode, num_splits, query_tiles
from nanovllm.backends.gpu.kernels.configs import GpuInfo, Tile, decode_tile, prefill_tile
from nanovllm.backends.gpu.kernels.linear import linear
from nanovllm.backends.gpu.kernels.pointwise import add_rms_norm, silu_and_mul
from nanovllm.backends.gpu.kernels.sampler import sample
from nanovllm.backends.gpu.kernels.store import norm_rope_store
from nanovllm.backends.int8 import Int8Weight
from nanovllm.models.batch import SamplingBatch
from nanovllm.models.fp8 import FP8
from tools.benchmarks.workloads import SHAPES

# The inputs of all calls together are larger than the L2 cache of any GPU.
COLD_BYTES = 512 << 20
# A graph starts in some microseconds, which count for all calls in it.
MIN_CALLS = 16
REPLAYS = 10
DEVICE = torch.device("cuda", 0)

Layer: Any = SimpleNamespace  # takes the place of a Linear
# The sizes of Qwen3-0.6B, and the number of rows of the pointwise kernels and the sampler.
HIDDEN, FFN, _, H, K, D, VOCAB = SHAPES["qwen3-0.6b"][:7]
BLOCK, ROWS = 16, 256
index: Any = partial(torch.randperm, device=DEVICE)
dense: Any = partial(sdpa, enable_gqa=True)


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


@dataclass(frozen=True)
class Decode:
    """Attention of one query per sequence, over KV caches whose blocks are in random order."""

    q: Tensor  # [S, H, D]
    kv: Tensor  # [2, copies, blocks, K, BLOCK, D]
    tables: Tensor  # [S, B] int32
    lens: Tensor  # [S] int64

    @classmethod
    def random(cls, contexts: list[int], dtype: torch.dtype) -> "Decode":
        """Return a case with keys and values in `dtype`, in as many caches as needed."""
        counts = [-(-n // BLOCK) for n in contexts]
        tables = torch.zeros((len(contexts), max(counts)), dtype=torch.int32, device=DEVICE)
        blocks = iter((index(sum(counts)).int() + 1).split(counts))  # block 0 is the null block
        for row, count in zip(tables, counts, strict=True):
            row[:count] = next(blocks)
        number = copies(2 * dtype.itemsize * sum(contexts) * K * D)
        kv = data(2, number, sum(counts) + 1, K, BLOCK, D).to(dtype)
        lens = torch.tensor(contexts).to(DEVICE)
        return cls(data(len(contexts), H, D), kv, tables, lens)

    @property
    def num_bytes(self) -> int:
        """The keys and values of all contexts."""
        return 2 * self.kv.dtype.itemsize * int(self.lens.sum()) * K * D

    def table_tile(self) -> Tile:
        """Return the tile of the table for this GPU."""
        return decode_tile(GpuInfo.of(DEVICE), D, self.q.dtype, self.kv.dtype == FP8)

    def calls(self, tile: Tile) -> list[Callable[[], None]]:
        """Return a call of the kernel for each of the caches."""
        rows, out = len(self.q), torch.empty_like(self.q)
        splits = num_splits(rows, K, tile.programs_per_sm * GpuInfo.of(DEVICE).num_sms)
        rest = (self.lens.argsort(descending=True), self.lens, self.tables, tile, splits, out)
        return [partial(attend_decode, self.q, k, v, *rest) for k, v in zip(*self.kv, strict=True)]

    def sdpa_calls(self) -> list[Callable[[], Tensor]]:
        """Return calls of torch's SDPA on the same bytes in order; all contexts are as long."""
        shape = (2, self.kv.shape[1], len(self.q), K, int(self.lens[0]), D)
        pairs = self.kv[:, :, 1:].view(shape).unbind(1)
        return [partial(dense, self.q[:, :, None], *pair) for pair in pairs]


def main() -> None:
    """Print a table of all kernels."""
    a, b = data(8192, 8192), data(8192, 8192)
    source, target = data(1 << 29), data(1 << 29)
    copy = seconds([lambda: target.copy_(source)])
    matmul = seconds([lambda: a @ b])
    peaks = {"GB/s": (4 << 29) / copy / 1e9, "TFLOP/s": 2 * 8192**3 / matmul / 1e12}
    lines = [", ".join(f"{rate:,.0f} {unit}" for unit, rate in peaks.items()) + " at most"]
    lines += [f"{'kernel':34}{'us':>10}{'rate':>17}{'of peak':>9}{'torch SDPA us':>15}"]
    for name, work, unit, calls, torch_calls in tqdm(cases(), desc="Kernels"):
        time = seconds(calls)
        torch_time = f"{1e6 * seconds(torch_calls):15.1f}" if torch_calls else ""
        rate = work / time / (1e9 if unit == "GB/s" else 1e12)
        share = rate / peaks[unit]
        lines.append(f"{name:34}{1e6 * time:10.1f}{rate:9,.0f} {unit:7}{share:9.0%}{torch_time}")
    print(f"\n{torch.cuda.get_device_name()}: " + "\n".join(lines))


def cache_dtypes() -> list[torch.dtype]:
    """Return the dtypes of a KV cache that Triton kernels can read on this GPU."""
    has_fp8 = torch.version.hip or torch.cuda.get_device_capability(DEVICE) >= (8, 9)
    return [torch.bfloat16, FP8] if has_fp8 else [torch.bfloat16]


def cases() -> Iterator[tuple[str, float, str, list[Any], list[Any]]]:
    """Yield (name, bytes moved or FLOPs, unit of the rate, calls, calls of torch or [])."""
    gpu = GpuInfo.of(DEVICE)
    lengths = (128, 1024, 8192, 32_768)
    for dtype, batch, length in product(cache_dtypes(), (1, 8, 64, 256), lengths):
        # The numbers exist in bfloat16 too, while they are converted.
        if 10 * batch * length * K * D > torch.cuda.mem_get_info(DEVICE)[0]:
            continue
        case = Decode.random([length] * batch, dtype)
        paged = case.calls(case.table_tile())
        other = case.sdpa_calls() if dtype != FP8 else []
        name = f"decode{' fp8' * (dtype == FP8)} {batch} x {length:,} tokens"
        yield name, case.num_bytes, "GB/s", paged, other

    rest: tuple[Any, ...]
    for dtype, length in product(cache_dtypes(), (1024, 2048, 4096, 8192, 16_384)):
        tile = prefill_tile(gpu, D, torch.bfloat16)
        q, out = data(length, H, D), data(length, H, D)
        dense_kv = data(2, length // BLOCK + 1, K, BLOCK, D)
        kv = dense_kv.to(dtype)
        starts = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        lens, tables = np.array([length]), index(length // BLOCK)
        tiles = torch.from_numpy(query_tiles(lens, tile.num_rows // (H // K))).cuda()
        rest = (tiles, starts, starts[1:].long(), tables.int()[None] + 1, tile, out)
        qkv = (q.transpose(0, 1)[None], *dense_kv[:, None, 1:].reshape(2, 1, K, length, D))
        chunk: list[Any] = [partial(attend, q, kv[0], kv[1], *rest)]
        other = [partial(dense, *qkv, is_causal=True)] if dtype != FP8 else []
        flops = 2 * H * D * length * (length + 1)
        yield f"prefill{' fp8' * (dtype == FP8)} {length:,} tokens", flops, "TFLOP/s", chunk, other

    shapes = ((4096, HIDDEN), (HIDDEN, FFN), (VOCAB, HIDDEN))
    for (outputs, inputs), rows in product(shapes, (1, 16, 64, 256)):
        # In place of SDPA, the table shows torch's linear with weights in bfloat16.
        shape = copies(outputs * inputs), outputs, inputs
        values = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
        x, scale, bf16 = data(rows, inputs), data(outputs).float(), torch.bfloat16
        quantized = [Layer(weight=Int8Weight(each, scale, bf16), bias=None) for each in values]
        ours: list[Any] = [partial(linear, x, layer) for layer in quantized]
        plain = [partial(torch.nn.functional.linear, x, each) for each in data(*shape)]
        yield f"int8 {outputs:,} x {inputs:,}, {rows} rows", outputs * inputs, "GB/s", ours, plain

    width, w, norm, cos = (H + 2 * K) * D, data(HIDDEN), data(D), data(ROWS, 1, D)
    add: Any = add_rms_norm
    slots, kv = index(ROWS * BLOCK)[:ROWS], data(2, ROWS, K, BLOCK, D)
    rope = (norm, norm, 1e-6, cos, cos, slots)
    ids, row = index(ROWS), torch.ones(ROWS, device="cuda")
    off = SamplingBatch(0.6 * row, ids, ids, {"top_k": 0 * ids, "top_p": row, "min_p": 0 * row})
    filters = {"top_k": 0 * ids + 50, "top_p": 0.95 * row, "min_p": 0 * row}
    on = SamplingBatch(0.6 * row, ids, ids, filters)
    # name: (values of the input per row, values moved per row, kernel)
    table: dict[str, tuple[int, int, Callable[[Any], object]]] = {
        "add, RMSNorm": (2 * HIDDEN, 4 * HIDDEN, lambda x: add(*x.view(2, ROWS, -1), w, 1e-6)),
        "SiLU, multiply": (2 * FFN, 3 * FFN, silu_and_mul),
        "norm, rotary, KV store": (width, 2 * width, lambda x: norm_rope_store(x, *rope, *kv)),
        "sampler": (VOCAB, VOCAB, lambda x: sample(x, off)),
        "sampler, top-k 50, top-p": (VOCAB, VOCAB, lambda x: sample(x, on)),
    }
    if FP8 in cache_dtypes():
        # A stored key or value takes one byte, which is half of a bfloat16.
        fp8, stored = kv.to(FP8), 2 * width - K * D
        table["norm, rotary, fp8 KV store"] = (
            width,
            stored,
            lambda x: norm_rope_store(x, *rope, *fp8),
        )
    for name, (size, moved, kernel) in table.items():
        tensors = data(min(256, copies(2 * ROWS * size)), ROWS, size)
        calls = [partial(kernel, x) for x in tensors]
        yield f"{name}, {ROWS} rows", 2 * ROWS * moved, "GB/s", calls, []
