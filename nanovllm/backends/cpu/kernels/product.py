"""Products of rows with packed weights. All kernels of blocks, one per kind of weight, are alike:

    (x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example, start, stop)

computes blocks [start, stop) of out [rows, outputs] = x W^T + bias. scale_ptr and bias_ptr may
be 0. In float32 and bfloat16 the kernel is `linear_blocks` of simd.py or amx.py. Its rows of x
are padded to whole words, by `pad_rows` if necessary. The kernels of int8.py and int4.py read the
rows that `quantize_rows` makes of x.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import get_num_threads
from torch import Tensor

from nanovllm.backends.cpu.jit import Kernel, compiled, has_amx, has_sdot
from nanovllm.backends.cpu.kernels.parallel import address_for, in_parts, parts_for
from nanovllm.backends.cpu.kernels.primitives import (
    DTYPE_EXAMPLE,
    array,
    bytes_of,
    f32,
    from_float32,
    int32,
    to_float32,
)
from nanovllm.backends.int4 import GROUP_SIZE
from nanovllm.backends.int8 import INT8_MAX, MIN_ABSMAX
from nanovllm.models.layers import Linear

# Rows of x are padded to this many bytes: to a word, or to what AMX multiplies at once.
ROW_UNIT = 64 if has_amx() else 4
# By how much the weights that a product in int8 multiplies are too large. See int8.py.
WEIGHT_OFFSET = 0 if has_sdot() else 128


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

    kernel: int  # the address of the kernel of blocks
    width: int  # outputs of a block
    itemsize: int = 0  # of the numbers of the rows that it reads, or 0 for quantized rows
    prepare: int = 0  # the address of quantize_rows or pad_rows, or 0 if it reads x itself

    def work_bytes(self, inputs: int) -> int:
        """Return the bytes of memory that the product of a row needs."""
        return row_bytes(self, inputs) if self.prepare else 0


@cache
def quantized_product(kernel: Kernel, width: int, dtype: torch.dtype) -> Product:
    """Return how a kernel of blocks multiplies with rows of a dtype, which it reads quantized."""
    quantize = address_for(quantize_rows, dtype, dtype)
    return Product(address_for(kernel, dtype, dtype), width, prepare=quantize)


@compiled()
def padded_bytes(inputs, itemsize):
    """Return the bytes of a row of whole words, of `inputs` numbers."""
    return (inputs * itemsize + ROW_UNIT - 1) // ROW_UNIT * ROW_UNIT


@compiled()
def row_bytes(product, inputs):
    """Return the bytes of a row that a kernel of blocks reads."""
    if product.itemsize == 0:
        return quantized_bytes(inputs)
    return padded_bytes(inputs, product.itemsize)


@compiled()
def pad_rows(x_ptr, out_ptr, rows, inputs, example, start, stop):
    """Copy rows [start, stop) of x [rows, inputs], with zeros after them up to whole words."""
    x = array(x_ptr, (rows, inputs), example)
    itemsize = bytes_of(example)
    size = padded_bytes(inputs, itemsize) // itemsize
    out = array(out_ptr, (rows, size), example)
    for i in range(start, stop):
        out[i, :inputs] = x[i]
        out[i, inputs:] = 0


@compiled()
def padded_inputs(inputs):
    """Return the number of values of a quantized row, and of its packed weights in int8."""
    return (inputs + GROUP_SIZE - 1) // GROUP_SIZE * GROUP_SIZE


@compiled()
def quantized_bytes(inputs):
    """Return the bytes of a quantized row, whose parts begin at multiples of 4 bytes."""
    size = padded_inputs(inputs)
    return (size + 8 + 4 * (size // GROUP_SIZE) + 63) // 64 * 64


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

    A row of the result has the values [I] int8, padded with zeros to whole groups of GROUP_SIZE,
    their scale in float32, and in int32 what makes up for weights that are larger by WEIGHT_OFFSET
    or 8: -WEIGHT_OFFSET times the sum of the values, and -8 times the sum of each group.
    """
    size = padded_inputs(inputs)
    stride = quantized_bytes(inputs)
    x = array(x_ptr, (rows, inputs), example)
    for i in range(start, stop):
        row = x[i]
        values = array(out_ptr + i * stride, (size,), np.int8(0))
        scale = array(out_ptr + i * stride + size, (1,), f32(0))
        starts = array(out_ptr + i * stride + size + 4, (1 + size // GROUP_SIZE,), int32(0))
        largest = largest_magnitude(row)
        inverse = f32(INT8_MAX) / largest
        whole = int32(0)
        for g in range(size // GROUP_SIZE):
            first, last = g * GROUP_SIZE, min(inputs, (g + 1) * GROUP_SIZE)
            # LLVM vectorizes loops over whole arrays, such as these slices: 10 times as fast.
            total = round_values(row[first:last], inverse, values[first:last])
            starts[1 + g] = int32(-8 * total)
            whole = int32(whole + total)
        for c in range(inputs, size):
            values[c] = 0
        scale[0] = largest * f32(1 / INT8_MAX)
        starts[0] = int32(-WEIGHT_OFFSET * whole)


@compiled()
def prepared(product, x_ptr, rows, inputs, work_ptr, example, parts):
    """Return the address of the rows that product.kernel reads: x itself, or rows at `work`."""
    if product.prepare == 0:
        return x_ptr
    arguments = x_ptr, work_ptr, rows, inputs, example
    in_parts(product.prepare, arguments, rows, parts_for(rows * inputs, parts))
    return work_ptr


@compiled()
def compute(product, x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs,
            work_ptr, example, parts):
    """Compute out [rows, outputs] = x W^T + bias of x [rows, inputs]. `work` has prepared rows."""
    x_ptr = prepared(product, x_ptr, rows, inputs, work_ptr, example, parts)
    arguments = (x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example)
    in_parts(product.kernel, arguments, (outputs + product.width - 1) // product.width, parts)


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


def multiply(product: Product, x: Tensor, pointers: tuple[int, int, int], outputs: int) -> Tensor:
    """Return x [T, I] times a weight: [T, O]. `pointers`: to the weight, its scale and the bias."""
    x = x.contiguous()
    rows, inputs = x.shape
    out = x.new_empty((rows, outputs))
    work = torch.empty(rows * product.work_bytes(inputs), dtype=torch.uint8, device="cpu")
    sizes = rows, inputs, outputs, work.data_ptr()
    compute(product, x.data_ptr(), *pointers, out.data_ptr(), *sizes, DTYPE_EXAMPLE[x.dtype],
            get_num_threads())
    return out


def pointers(module: Linear) -> tuple[int, int, int]:
    """Return the addresses of a packed weight, its scale and the bias; 0 for what it lacks."""
    tensors = module.weight.values, module.weight.scale, module.bias
    values, scale, bias = (0 if t is None else t.data_ptr() for t in tensors)
    return values, scale, bias
