"""Linear layers with weights in int4 on a CPU: `dynamic` of backends/int4.py in one kernel.

The weights are stored in the order in which the kernel reads them: values [O / 16, G, 4, 16] int32
and scale [O / 16, G, 16] float16, where G is the number of groups of 32 inputs.

    one vector      output    0       1    ..   15
    low halves            [ wwww | wwww | .. | wwww ]    inputs  0 to  3 of the group (first vector)
    high halves           [ wwww | wwww | .. | wwww ]    inputs 16 to 19

VNNI and AVX2 multiply unsigned by signed numbers, and w + 8 is stored, which SDOT multiplies as
well. The sum of a group therefore starts at -8 times the sum of the token's activations in the
group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.llvm.dot import int4_rows
from nanovllm.backends.cpu.kernels.primitives import array, bytes_of, f32
from nanovllm.backends.cpu.kernels.product import (
    PackedRows,
    Product,
    finish,
    quantized_bytes,
    quantized_product,
)
from nanovllm.backends.int4 import GROUP_SIZE, Int4Weight

OUTPUTS = 16  # of a block of weights
TOKEN_BLOCK = 64  # tokens that stay in the L2 cache


@dataclass(slots=True)
class PackedInt4(PackedRows, Int4Weight):
    """A weight in int4."""

    rows: range

    @classmethod
    def empty(cls, empty: Callable[..., Tensor], outputs: int, inputs: int) -> PackedInt4:
        blocks, groups = -(-outputs // OUTPUTS), -(-inputs // GROUP_SIZE)
        values = empty(blocks, groups, 4, OUTPUTS, dtype=torch.int32)
        scale = empty(blocks, groups, OUTPUTS, dtype=torch.float16)
        return cls(values, scale, inputs, empty(0).dtype, range(outputs))

    @property
    def product(self) -> Product:
        return quantized_product(int4_blocks, OUTPUTS, self.dtype)

    def store(self, start: int, packed: Tensor, scale: Tensor) -> None:
        rows = torch.tensor(self.rows[start : start + len(packed)])
        self.values[rows // OUTPUTS, :, :, rows % OUTPUTS] = packed
        self.scale[rows // OUTPUTS, :, rows % OUTPUTS] = scale

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        if isinstance(rows, slice):
            rows = torch.tensor(range(len(self.rows))[rows])
        rows = rows + self.rows.start
        block, output = rows // OUTPUTS, rows % OUTPUTS
        return self.values[block, :, :, output], self.scale[block, :, output]


@compiled()
def multiply_block(sums_ptr, x_ptr, weight_ptr, scale_ptr, groups, stride, tokens):
    """Compute sums [tokens, 16] float32 of quantized rows times a block of weights.

    The first four arguments are addresses. The rows begin `stride` bytes apart.
    """
    t = 0
    while t < tokens:
        x = x_ptr + t * stride
        sums = sums_ptr + 4 * OUTPUTS * t
        left = tokens - t
        if left >= 8:
            int4_rows(8, x, stride, weight_ptr, scale_ptr, groups, sums)
            t += 8
        elif left >= 4:
            int4_rows(4, x, stride, weight_ptr, scale_ptr, groups, sums)
            t += 4
        elif left >= 2:
            int4_rows(2, x, stride, weight_ptr, scale_ptr, groups, sums)
            t += 2
        else:
            int4_rows(1, x, stride, weight_ptr, scale_ptr, groups, sums)
            t += 1


@compiled()
def int4_blocks(x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example,
                start, stop):
    """Compute blocks of 16 outputs, as product.py describes."""
    groups = (inputs + GROUP_SIZE - 1) // GROUP_SIZE
    stride = quantized_bytes(inputs)
    itemsize = bytes_of(example)
    sums = np.empty((TOKEN_BLOCK, OUTPUTS), f32)
    for first in range(0, rows, TOKEN_BLOCK):
        tokens = min(TOKEN_BLOCK, rows - first)
        x = x_ptr + first * stride
        for block in range(start, stop):
            o = block * OUTPUTS
            sums_ptr = np.int64(sums.ctypes.data)
            bias = bias_ptr + o * itemsize if bias_ptr != 0 else np.int64(0)
            multiply_block(sums_ptr, x, weight_ptr + o * groups * GROUP_SIZE // 2,
                           scale_ptr + 2 * o * groups, groups, stride, tokens)
            for i in range(tokens):
                token_scale = array(x + i * stride + groups * GROUP_SIZE, (1,), f32(0))[0]
                out = out_ptr + ((first + i) * outputs + o) * itemsize
                finish(sums_ptr + 4 * OUTPUTS * i, token_scale, np.int64(0), bias, out,
                       min(OUTPUTS, outputs - o), f32(0), example)
