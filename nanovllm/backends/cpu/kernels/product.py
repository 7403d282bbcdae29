"""Products of rows with packed weights. All kernels of blocks, one per kind of weight, are alike:

    (x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example, start, stop)

computes blocks [start, stop) of out [rows, outputs] = x W^T + bias. scale_ptr and bias_ptr may
be 0. In float32 and bfloat16 the kernel is `linear_blocks` of blocks.py or amx.py, and x is
[rows, inputs]. The kernels of int8.py and int4.py read the rows that `quantize_rows` makes of x.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import get_num_threads
from torch import Tensor

from nanovllm.backends.cpu.jit import Kernel, compiled
from nanovllm.backends.cpu.kernels.parallel import address_for, in_parts, parts_for
from nanovllm.backends.cpu.kernels.primitives import (
    DTYPE_EXAMPLE,
    array,
    f32,
    from_float32,
    int32,
    to_float32,
)
from nanovllm.backends.int4 import GROUP
from nanovllm.backends.int8 import INT8_MAX, MIN_ABSMAX
from nanovllm.models.layers import Linear


class PackedRows:
    """A part of a packed weight [O, I]: of all outputs that are stored, it has `rows`."""

    __slots__ = ()
    rows: range
    inputs: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), self.inputs))

    def split(self, sizes: list[int]) -> Sequence[Any]:
        ends = np.cumsum(sizes).tolist()
        parts = [self.rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        weight: Any = self
        return [replace(weight, rows=rows) for rows in parts]


class Product(NamedTuple):
    """How packed weights of one kind are multiplied."""

    blocks: int  # the address of the kernel of blocks
    width: int  # outputs of a block
    quantize: int = 0  # the address of quantize_rows, or 0

    def row_bytes(self, inputs: int) -> int:
        """Return the bytes of a quantized row, or 0 if rows are not quantized."""
        return quantized_bytes(inputs) if self.quantize else 0


@cache
def quantized_product(blocks: Kernel, width: int, dtype: torch.dtype) -> Product:
    """Return how a kernel of blocks multiplies with rows of a dtype, which it reads quantized."""
    code, quantize = (address_for(kernel, dtype, dtype) for kernel in (blocks, quantize_rows))
    return Product(code, width, quantize)


@compiled()
def padded_inputs(inputs):
    """Return the number of values of a quantized row, and of its packed weights in int8."""
    return (inputs + GROUP - 1) // GROUP * GROUP


@compiled()
def quantized_bytes(inputs):
    """Return the bytes of a quantized row, whose parts begin at multiples of 4 bytes."""
    size = padded_inputs(inputs)
    return (size + 8 + 4 * (size // GROUP) + 63) // 64 * 64


@compiled(exact=True)
def largest_magnitude(x):
    """Return the largest magnitude of x [N], at least MIN_ABSMAX."""
    # As integers, the bits of magnitudes are in the same order, and the bits of NaN last.
    bits = f32(MIN_ABSMAX).view(np.int32)
    for c in range(len(x)):
        number = np.float32(to_float32(x[c])).view(np.int32)
        bits = max(bits, int32(number & int32(0x7FFFFFFF)))
    return int32(bits).view(np.float32)


@compiled(exact=True)
def round_values(x, inverse, values):
    """Set values [N] to x [N] times `inverse`, rounded. Return their sum."""
    total = int32(0)
    for c in range(len(x)):
        value = int32(np.rint(to_float32(x[c]) * inverse))
        values[c] = np.int8(value)
        total = int32(total + value)
    return total


@compiled(exact=True)
def quantize_rows(x_ptr, out_ptr, rows, inputs, example, start, stop):
    """Quantize rows [start, stop) of x [rows, inputs].

    A row of the result has the values [I] int8, padded with zeros to whole groups of GROUP, their
    scale in float32, and in int32 what makes up for stored weights that are larger by 128 or 8:
    -128 times the sum of the values, and -8 times the sum of each group.
    """
    size, stride = padded_inputs(inputs), quantized_bytes(inputs)
    x = array(x_ptr, (rows, inputs), example)
    for i in range(start, stop):
        row, values = x[i], array(out_ptr + i * stride, (size,), np.int8(0))
        scale = array(out_ptr + i * stride + size, (1,), f32(0))
        starts = array(out_ptr + i * stride + size + 4, (1 + size // GROUP,), int32(0))
        largest, whole = largest_magnitude(row), int32(0)
        inverse = f32(INT8_MAX) / largest
        for g in range(size // GROUP):
            first, last = g * GROUP, min(inputs, (g + 1) * GROUP)
            # LLVM vectorizes loops over whole arrays, such as these slices: 10 times as fast.
            total = round_values(row[first:last], inverse, values[first:last])
            starts[1 + g], whole = int32(-8 * total), int32(whole + total)
        for c in range(inputs, size):
            values[c] = 0
        scale[0], starts[0] = largest * f32(1 / INT8_MAX), int32(-128 * whole)


@compiled()
def quantized(code, x_ptr, rows, inputs, work_ptr, example, parts):
    """Return the address of the rows that code.blocks reads: x itself, or quantized at `work`."""
    if code.quantize == 0:
        return x_ptr
    arguments = x_ptr, work_ptr, rows, inputs, example
    in_parts(code.quantize, arguments, rows, parts_for(rows * inputs, parts))
    return work_ptr


@compiled()
def product(code, x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, work_ptr,
            example, parts):
    """Compute out [rows, outputs] = x W^T + bias of x [rows, inputs]. `work` has quantized rows."""
    x_ptr = quantized(code, x_ptr, rows, inputs, work_ptr, example, parts)
    arguments = (x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example)
    in_parts(code.blocks, arguments, (outputs + code.width - 1) // code.width, parts)


@compiled(exact=True)
def finish(sums_ptr, token_scale, scale_ptr, bias_ptr, out_ptr, count, sum_example, example):
    """Compute out [count] = sums * token_scale * scale + bias. scale_ptr and bias_ptr may be 0."""
    sums, scale = array(sums_ptr, (count,), sum_example), array(scale_ptr, (count,), f32(0))
    bias, out = array(bias_ptr, (count,), example), array(out_ptr, (count,), example)
    for c in range(count):
        total = f32(sums[c]) * token_scale
        total = total * scale[c] if scale_ptr != 0 else total
        total = total + to_float32(bias[c]) if bias_ptr != 0 else total
        out[c] = from_float32(total, example)


def multiply(code: Product, x: Tensor, pointers: tuple[int, int, int], outputs: int) -> Tensor:
    """Return x [T, I] times a weight: [T, O]. `pointers`: to the weight, its scale and the bias."""
    x = x.contiguous()
    rows, inputs = x.shape
    out = x.new_empty((rows, outputs))
    work = torch.empty(rows * code.row_bytes(inputs), dtype=torch.uint8)
    sizes = rows, inputs, outputs, work.data_ptr()
    product(code, x.data_ptr(), *pointers, out.data_ptr(), *sizes, DTYPE_EXAMPLE[x.dtype],
            get_num_threads())
    return out


def linear(x: Tensor, module: Linear) -> Tensor:
    """Return x [T, I] in float32 or bfloat16 times a weight in int8 or int4: [T, O]."""
    return multiply(module.weight.product(), x, pointers(module), len(module.weight.rows))


def pointers(module: Linear) -> tuple[int, int, int]:
    """Return the addresses of a weight in int8 or int4, its scale and the bias."""
    weight, bias = module.weight, module.bias
    addresses = weight.values.data_ptr(), weight.scale.data_ptr()
    return *addresses, 0 if bias is None else bias.data_ptr()
