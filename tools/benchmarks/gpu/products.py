"""Times the products of a decode by shape, number of rows and implementation, with cold weights."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.backends.gpu.kernels import few_rows, int8
from nanovllm.backends.int8 import Int8Weight
from tools.benchmarks import roofline
from tools.benchmarks.gpu.rows import Row, headline
from tools.benchmarks.gpu.timing import COLD_BYTES, DEVICE, copies, data, seconds
from tools.benchmarks.workloads import SHAPES

SHAPE = "qwen3-0.6b"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
FEW, MOST_FEW = "few rows", 8  # the engine uses it for at most 4
LIBRARIES = ("cublas", "cublaslt")  # of torch


def layer_shapes(shape: str) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of the products of a layer, in their order."""
    hidden, ffn, _, heads, kv_heads, head_dim = SHAPES[shape][:6]
    qkv = (heads + 2 * kv_heads) * head_dim
    return [(qkv, hidden), (hidden, heads * head_dim), (2 * ffn, hidden), (hidden, ffn)]


def in_blas(library: str, function: Callable[[Tensor], Any], x: Tensor) -> None:
    """Call a function while torch prefers one of its libraries."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        function(x)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def few_rows_linear(weight: Any, x: Tensor) -> Tensor:
    """Call the product of the path for few rows."""
    out = x.new_empty((len(x), weight.shape[0]))
    return few_rows.linear(x, weight, out, few_rows.Target.of(DEVICE))


def implementations(
    outputs: int, inputs: int
) -> Iterator[tuple[str, int, list[Callable[[Tensor], Any]]]]:
    """Yield (name, bytes of a weight, functions of x, each with other weights)."""
    weights = data(copies(2 * outputs * inputs), outputs, inputs)
    plain = [partial(F.linear, weight=weight) for weight in weights]
    for library in LIBRARIES:
        yield library, 2, [partial(in_blas, library, function) for function in plain]
    scale = data(outputs).float()
    layers: list[Any] = [
        SimpleNamespace(weight=Int8Weight(values, scale, torch.bfloat16), bias=None)
        for values in weights.view(torch.int8).view(-1, outputs, inputs)
    ]
    yield "int8", 1, [partial(int8.linear, module=layer) for layer in layers]
    yield FEW, 2, [partial(few_rows_linear, weight) for weight in weights]
    yield f"{FEW}, int8", 1, [partial(few_rows_linear, layer.weight) for layer in layers]


def rows() -> Iterator[Row]:
    """Yield a row for each product, and one for each shape with torch's shares of the roofline."""
    peak = roofline.measure_peak(DEVICE, torch.bfloat16, COLD_BYTES)
    head = (SHAPES[SHAPE][6], SHAPES[SHAPE][0])
    names = ("q, k, v", "o", "gate, up", "down", "head")
    for product, (outputs, inputs) in zip(names, [*layer_shapes(SHAPE), head], strict=True):
        best = dict.fromkeys(ROWS, 0.0)  # of LIBRARIES
        for by, itemsize, functions in implementations(outputs, inputs):
            for num in (num for num in ROWS if num <= MOST_FEW or not by.startswith(FEW)):
                x, size = data(num, inputs), itemsize * outputs * inputs
                flops = 2 * num * outputs * inputs
                time = seconds([partial(function, x) for function in functions])
                share = max(size / peak["bandwidth"], flops / peak["flops"]) / time
                if by in LIBRARIES:
                    best[num] = max(best[num], share)
                row: Row = {"product": f"{product} {inputs} -> {outputs}", "by": by, "rows": num}
                row |= {"us": 1e6 * time, "GB/s": size / time / 1e9}
                yield row | {"TFLOP/s": flops / time / 1e12, "share": share}
        shares: Row = {f"{num} rows": share for num, share in best.items()}
        yield headline({"product": product, "by": "torch, share of the roofline"} | shares)
