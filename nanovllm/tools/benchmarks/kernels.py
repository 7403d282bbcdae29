"""Measures each Triton kernel as a fraction of the GPU's copy bandwidth or matmul rate.

A CUDA graph contains all calls, so launches cost nothing. The inputs of all calls together are
larger than the L2 cache. Attention is also measured with torch's SDPA, which reads a contiguous KV
cache with sequences of the same lengths.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from tqdm import tqdm
from triton.testing import do_bench_cudagraph

from nanovllm.backends.gpu.kernels.attention import attend, attend_decode, num_splits, query_tiles
from nanovllm.backends.gpu.kernels.configs import GpuInfo, decode_tile, prefill_tile
from nanovllm.backends.gpu.kernels.int8 import linear
from nanovllm.backends.gpu.kernels.pointwise import add_rms_norm, silu_and_mul
from nanovllm.backends.gpu.kernels.sampling import sample
from nanovllm.backends.gpu.kernels.store import norm_rope_store
from nanovllm.backends.int8 import Int8Weight
from nanovllm.models.batch import SamplingBatch
from nanovllm.models.fp8 import FP8

Layer: Any = SimpleNamespace  # takes the place of a Linear
# The sizes of Qwen3-0.6B, and the number of rows of the pointwise kernels and the sampler.
H, K, D, BLOCK, HIDDEN, FFN, VOCAB, ROWS = 16, 8, 128, 16, 1024, 3072, 151_936, 256
L2_BYTES = 512 << 20
data: Any = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
index: Any = partial(torch.randperm, device="cuda")


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


def seconds(calls: list[Callable[[], object]]) -> float:
    """Return the median time of a call, or nan if it runs out of memory."""
    # do_bench_cudagraph uses another stream, which does not wait until the inputs are written.
    torch.cuda.synchronize()
    try:
        time = do_bench_cudagraph(lambda: [call() for call in calls], return_mode="median")
    except torch.OutOfMemoryError:
        return float("nan")
    return float(time) / 1e3 / len(calls)


def cache_dtypes() -> list[torch.dtype]:
    """Return the dtypes of a KV cache that Triton kernels can read on this GPU."""
    has_fp8 = torch.version.hip or torch.cuda.get_device_capability() >= (8, 9)
    return [torch.bfloat16, FP8] if has_fp8 else [torch.bfloat16]


def cases() -> Iterator[tuple[str, float, str, list[Any], list[Any]]]:
    """Yield (name, bytes moved or FLOPs, unit of the rate, calls, calls of torch or [])."""
    gpu = GpuInfo.of(torch.device("cuda"))
    dense = partial(sdpa, enable_gqa=True)
    rest: tuple[Any, ...]
    lengths = (128, 1024, 8192, 32_768)
    for dtype, batch, length in product(cache_dtypes(), (1, 8, 64, 256), lengths):
        tile = decode_tile(gpu, D, torch.bfloat16, dtype == FP8)
        size = 2 * dtype.itemsize * batch * length * K * D
        blocks = batch * length // BLOCK
        if 5 / dtype.itemsize * size > torch.cuda.mem_get_info()[0]:
            continue
        # Block 0 is the null block.
        dense_kv = data(2, min(1024, -(-L2_BYTES // size)), blocks + 1, K, BLOCK, D)
        kv = dense_kv.to(dtype)
        tables = (index(blocks).int() + 1).view(batch, -1)
        lens = index(batch) * 0 + length
        q, out = data(batch, H, D), data(batch, H, D)
        splits = num_splits(batch, K, tile.programs_per_sm * gpu.num_sms)
        rest = (lens.argsort(), lens, tables, tile, splits, out)
        paged = [partial(attend_decode, q, k, v, *rest) for k, v in zip(*kv, strict=True)]
        pairs = dense_kv[:, :, 1:].view(2, -1, batch, K, length, D).unbind(1)
        other = [partial(dense, q[:, :, None], *pair) for pair in pairs] if dtype != FP8 else []
        name = f"decode{' fp8' * (dtype == FP8)} {batch} x {length:,} tokens"
        yield name, size, "GB/s", paged, other

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
        paged = [partial(attend, q, kv[0], kv[1], *rest)]
        other = [partial(dense, *qkv, is_causal=True)] if dtype != FP8 else []
        flops = 2 * H * D * length * (length + 1)
        yield f"prefill{' fp8' * (dtype == FP8)} {length:,} tokens", flops, "TFLOP/s", paged, other

    shapes = ((4096, HIDDEN), (HIDDEN, FFN), (VOCAB, HIDDEN))
    for (outputs, inputs), rows in product(shapes, (1, 16, 64, 256)):
        # In place of SDPA, the table shows torch's linear with weights in bfloat16.
        shape = -(-L2_BYTES // (outputs * inputs)), outputs, inputs
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
        inputs = data(min(256, -(-L2_BYTES // (2 * ROWS * size))), ROWS, size)
        calls = [partial(kernel, x) for x in inputs]
        yield f"{name}, {ROWS} rows", 2 * ROWS * moved, "GB/s", calls, []
