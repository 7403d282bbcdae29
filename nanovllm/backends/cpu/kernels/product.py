"""Products of rows with packed weights. All kernels of blocks, one per kind of weight, are alike:

    (x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example, start, stop)

computes blocks [start, stop) of out [rows, outputs] = x W^T + bias. scale_ptr and bias_ptr may
be 0. In float32 and bfloat16 the kernel is `linear_blocks` of simd.py or amx.py. Its rows of x
are padded to whole words, by `pad_rows` if necessary. The kernels of int8.py and int4.py read the
rows that `quantize_rows` makes of x.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu.jit import Kernel, compiled, has_amx, has_sdot
from nanovllm.backends.cpu.kernels.parallel import address_for, in_parts, parts_for
from nanovllm.backends.cpu.kernels.primitives import (
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


class Product(NamedTuple):
    """How packed weights of one kind are multiplied."""

    kernel: int  # the address of the kernel of blocks
    width: int  # outputs of a block
    itemsize: int = 0  # of the numbers of the rows that it reads, or 0 for quantized rows
    prepare: int = 0  # the address of quantize_rows or pad_rows, or 0 if it reads x itself

    def work_bytes(self, inputs: int) -> int:
        """Return the bytes of memory that the product of a row needs."""
        return row_bytes(self, inputs) if self.prepare else 0


@dataclass
class PackedWeight:
    """Rows of a weight in the order in which a kernel reads it; it is loaded like a tensor [O, I].

    O counts the outputs of all experts, or of an ordinary layer. Those of an expert are padded to
    whole blocks, and the inputs of an output to words of 4 bytes. Subclasses convert rows.
    """

    values: Tensor  # [blocks, words, width] int32
    scale: Tensor  # [blocks, scales of an output, width]
    product: Product
    rows: range  # of all outputs that are stored
    inputs: int  # I
    outputs: int  # of an expert
    dtype: torch.dtype  # of the model

    @classmethod
    def layout(cls, dtype: torch.dtype, inputs: int) -> tuple[Product, int, int, torch.dtype]:
        """Return the product, words and scales of an output, and the dtype of scales."""
        raise NotImplementedError

    @classmethod
    def empty(
        cls, empty: Callable[..., Tensor], outputs: int, inputs: int, experts: int = 1
    ) -> Self:
        """Return an uninitialized weight. `empty` makes tensors, by default in its dtype."""
        dtype = empty(0).dtype
        product, words, scales, scale_dtype = cls.layout(dtype, inputs)
        blocks = experts * -(-(outputs // experts) // product.width)
        values = empty(blocks, words, product.width, dtype=torch.int32)
        scale = empty(blocks, scales, product.width, dtype=scale_dtype)
        return cls(values, scale, product, range(outputs), inputs, outputs // experts, dtype)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), self.inputs))

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def tensors(self) -> list[Tensor]:
        return [self.values, self.scale]

    def split(self, sizes: list[int]) -> Sequence[Self]:
        """Return views of consecutive rows, `sizes` outputs each."""
        ends = np.cumsum(sizes).tolist()
        parts = [self.rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return [replace(self, rows=rows) for rows in parts]

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the blocks and the places within them of rows [N]."""
        width = self.product.width
        rows = rows + self.rows.start
        blocks = -(-self.outputs // width)  # of an expert
        expert, output = rows // self.outputs, rows % self.outputs
        return expert * blocks + output // width, output % width

    def store(self, start: int, words: Tensor, scale: Tensor) -> None:
        """Store rows from row `start`: words [N, words] int32, and their scales [N, scales]."""
        block, place = self.places(torch.arange(start, start + len(words), device=words.device))
        self.values[block, :, place] = words
        self.scale[block, :, place] = scale

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the words [N, words] int32 of rows [N] and their scales [N, scales]."""
        block, place = self.places(rows)
        return self.values[block, :, place], self.scale[block, :, place]


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
def finish(sums_ptr, token_scale_ptr, stride, scale_ptr, bias_ptr, out_ptr, rows, outputs, start,
           width, sum_example, example):
    """Compute a block of out [rows, outputs], the outputs from `start`, from sums [rows, width].

    out = sums * token scale * scale + bias, without what has the address 0. The scales of tokens
    are `stride` bytes apart.
    """
    itemsize = bytes_of(example)
    count = min(width, outputs - start)
    scale = array(scale_ptr + 4 * start, (count,), f32(0))
    bias = array(bias_ptr + itemsize * start, (count,), example)
    for row in range(rows):
        sums = array(sums_ptr + 4 * width * row, (count,), sum_example)
        out = array(out_ptr + itemsize * (outputs * row + start), (count,), example)
        token_scale = f32(1)
        if token_scale_ptr != 0:
            token_scale = array(token_scale_ptr + stride * row, (1,), f32(0))[0]
        for c in range(count):
            total = f32(sums[c]) * token_scale
            total = total * scale[c] if scale_ptr != 0 else total
            total = total + to_float32(bias[c]) if bias_ptr != 0 else total
            out[c] = from_float32(total, example)


def pointers(module: Linear) -> tuple[int, int, int]:
    """Return the addresses of a packed weight, its scales and the bias; 0 for what it lacks."""
    weight, bias = module.weight, module.bias
    scale = weight.scale.data_ptr()  # 0 if there are none
    return weight.values.data_ptr(), scale, 0 if bias is None else bias.data_ptr()
