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

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.llvm.int4 import int4_rows
from nanovllm.backends.cpu.kernels.primitives import bytes_of, f32
from nanovllm.backends.cpu.kernels.product import (
    PackedWeight,
    Product,
    finish,
    quantized_bytes,
    quantized_product,
)
from nanovllm.backends.int4 import GROUP_SIZE, Int4Weight

OUTPUTS = 16  # of a block of weights
TOKEN_BLOCK = 64  # tokens that stay in the L2 cache


class PackedInt4(PackedWeight):
    """A weight in int4. A word has 8 inputs of an output."""

    takes_int4 = True

    @classmethod
    def layout(cls, dtype: torch.dtype, inputs: int) -> tuple[Product, int, int, torch.dtype]:
        groups = -(-inputs // GROUP_SIZE)
        return quantized_product(int4_blocks, OUTPUTS, dtype), 4 * groups, groups, torch.float16

    copy_: Any = Int4Weight.copy_

    def store(self, start: int, packed: Tensor, scale: Tensor) -> None:
        super().store(start, packed.flatten(1), scale)


@compiled()
def multiply_block(sums_ptr, x_ptr, weight_ptr, scale_ptr, groups, stride, tokens):
    """Compute sums [tokens, 16] of a block. Within int4_blocks its registers would not suffice."""
    int4_rows(x_ptr, stride, weight_ptr, scale_ptr, groups, sums_ptr, tokens)


@compiled()
def int4_blocks(x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example,
                start, stop):
    """Compute blocks of 16 outputs, as product.py describes."""
    groups = (inputs + GROUP_SIZE - 1) // GROUP_SIZE
    stride = quantized_bytes(inputs)
    sums = np.empty((TOKEN_BLOCK, OUTPUTS), f32)
    for first in range(0, rows, TOKEN_BLOCK):
        tokens = min(TOKEN_BLOCK, rows - first)
        x = x_ptr + first * stride
        for block in range(start, stop):
            o = block * OUTPUTS
            sums_ptr = np.int64(sums.ctypes.data)
            multiply_block(sums_ptr, x, weight_ptr + o * groups * GROUP_SIZE // 2,
                           scale_ptr + 2 * o * groups, groups, stride, tokens)
            finish(sums_ptr, x + groups * GROUP_SIZE, stride, 0, bias_ptr,
                   out_ptr + first * outputs * bytes_of(example), tokens, outputs, o, OUTPUTS,
                   f32(0), example)
