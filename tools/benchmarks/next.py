"""What to do next on a GPU: a minute of measurements for three choices of docs/performance.md.

    python -m tools.benchmarks.next

products  of 1 to 64 rows with weights in bfloat16: the kernel of quantized weights, and cuBLAS
decodes   attention over an fp8 cache: the tile of the table, and four others
prompts   attention of a whole prompt: the kernel, and cuDNN through torch's SDPA

Each is timed by replays of a CUDA graph. Without a GPU the kernels run in Triton's interpreter at
small sizes, to try the script.
"""
# ruff: noqa: E402 - the variable is set before Triton is imported

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanovllm.backends.gpu.attention import TritonAttention
from nanovllm.backends.gpu.kernels import linear
from nanovllm.backends.gpu.kernels.configs import Tile
from nanovllm.cli.check import SCALES
from nanovllm.cli.check_cases import HEADS, Timed, captured, seconds
from nanovllm.features.kernel_check.comparisons import attention_step
from nanovllm.loading.select_backend import pick_backend, pick_device
from nanovllm.models.backend import Backend

DEVICE = pick_device("auto")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
# (outputs, inputs) of the products of Qwen3-0.6B, and the numbers of rows.
SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151_936, 1024)]
SHAPES, ROWS = (SHAPES, (1, 16, 64)) if ON_GPU else ([(64, 64)], (1,))
FEW_ROWS = {
    "8 warps": linear.LinearTile(16, 16, 512, 8, 8, 2),
    "32 outputs": linear.LinearTile(16, 32, 256, 4, 4, 4),
    "the tile of experts": linear.FEW,
}
# (rows, tokens of each) of decodes, and the tokens of prompts.
DECODES, PROMPTS = ([(64, 2048), (1, 32_768)], (1024, 8192)) if ON_GPU else ([(2, 40)], (40,))
TILES = Tile(16, 32, 1, 3, 6), Tile(16, 64, 2, 3, 4), Tile(16, 64, 4, 3, 3), Tile(16, 128, 4, 3, 2)
CACHE = 256 << 20  # bytes, more than the caches of a GPU hold


def show(name: str, call: Callable[[], object], work: float, unit: str = "GB/s") -> None:
    """Print the rate of `call`, or why it fails."""
    try:
        item = Timed(call, work, unit)
        if ON_GPU:
            item = captured(item)
            rate = f"{item.work / seconds(item.call) / SCALES[unit]:8.1f} {unit}"
        else:
            call()
            rate = "not timed"
    except Exception as error:  # of Triton, of its compilers or of torch
        rate = f"failed: {error!r:.150}"
    print(f"  {name:36} {rate}", flush=True)


def each(product: Callable[[Tensor], Tensor], weights: Tensor) -> None:
    for weight in weights:
        product(weight)


def multiply(x: Tensor, tile: linear.LinearTile, weight: Tensor) -> Tensor:
    return linear.multiply(x, weight, None, tile, -(-len(x) // tile.num_rows))


def products() -> None:
    tiles = linear.HALF if ON_GPU else linear.FLOAT32
    for outputs, inputs in SHAPES:
        # Several weights take turns, because a GPU would keep a single one in its cache.
        copies = 1 + (CACHE // (outputs * inputs * DTYPE.itemsize) if ON_GPU else 0)
        weights = torch.randn(copies, outputs, inputs, device=DEVICE).to(DTYPE)
        for rows in ROWS:
            print(f"{rows} rows, {outputs} x {inputs}")
            x = torch.randn(rows, inputs, device=DEVICE).to(DTYPE)
            ways: dict[str, Any] = {"torch": partial(F.linear, x)}
            chosen = {"tile of the table": tiles[min(limit for limit in tiles if limit >= rows)]}
            for name, tile in (chosen | FEW_ROWS if rows <= 16 and ON_GPU else chosen).items():
                ways[f"kernel, {name}"] = partial(multiply, x, tile)
            for name, way in ways.items():
                show(name, partial(each, way, weights), weights.nbytes)


def attentions() -> None:
    backends = pick_backend("triton", DEVICE, DTYPE, lambda: 10**9), Backend(DEVICE, DTYPE)
    num, kv_heads, dim = HEADS[0]
    for rows, length in DECODES:
        print(f"decodes of {rows} rows of {length} tokens, fp8 cache")
        lens: dict[str, Any] = dict(contexts=[length] * rows, query_lens=[1] * rows)
        given = attention_step(backends, HEADS[0], None, 16, ON_GPU, empty=0.0, **lens)
        attention, q, batch = next(given)
        assert isinstance(attention, TritonAttention)
        for tile in (attention.decode_tile, *TILES):
            attention.decode_tile = tile
            attention.prepare(batch)
            work = 2 * rows * length * kv_heads * dim * attention.cache.itemsize
            name = f"{tile.num_keys} keys, {tile.num_warps} warps, {tile.num_stages} stages"
            show(name, partial(attention.attend, 0, q, batch), work)
    for length in PROMPTS:
        print(f"a prompt of {length} tokens")
        lens = dict(contexts=[length], query_lens=[length])
        kernel, sdpa = attention_step(backends, HEADS[0], None, 16, False, empty=0.0, **lens)
        flops = 2.0 * num * dim * length * (length + 1)
        for name, (attention, q, batch) in {"kernel": kernel, "SDPA": sdpa}.items():
            used = SDPBackend.CUDNN_ATTENTION if ON_GPU else SDPBackend.MATH
            with sdpa_kernel(used):
                show(name, partial(attention.attend, 0, q, batch), flops, "TFLOP/s")


if __name__ == "__main__":
    with torch.inference_mode():
        products()
        attentions()
