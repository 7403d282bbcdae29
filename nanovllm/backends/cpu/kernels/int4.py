"""Linear layers with weights in int4 on a CPU: `dynamic` of backends/int4.py in one kernel.

The weights are stored in the order in which the kernel reads them: values [O / 16, G, 4, 16] int32
and scale [O / 16, G, 16] float16, where G is the number of groups of 32 inputs.

    one vector      output    0       1    ..   15
    low halves            [ wwww | wwww | .. | wwww ]    inputs  0 to  3 of the group (first vector)
    high halves           [ wwww | wwww | .. | wwww ]    inputs 16 to 19

VNNI and AVX2 multiply unsigned by signed numbers, and w + 8 is stored. The sum of a group
therefore starts at -8 times the sum of the token's activations in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numba import get_num_threads
from torch import Tensor

from nanovllm.backends.cpu.jit import compiled, has_feature
from nanovllm.backends.cpu.kernels import int8
from nanovllm.backends.cpu.kernels.llvm.calls import decode_float16
from nanovllm.backends.cpu.kernels.llvm.dot_int4 import int4_rows
from nanovllm.backends.cpu.kernels.parallel import address_for
from nanovllm.backends.cpu.kernels.primitives import DTYPE_EXAMPLE, array, from_float32, to_float32
from nanovllm.backends.int4 import GROUP, Int4Weight
from nanovllm.models.layers import Linear

f32 = np.float32
OUTPUTS = 16  # of a block of weights
TOKEN_BLOCK = 64  # tokens that stay in the L2 cache


@dataclass(slots=True)
class PackedInt4(Int4Weight):
    """A weight in int4. Of all outputs in `values`, `rows` are this weight."""

    rows: range

    @classmethod
    def empty(cls, empty: Callable[..., Tensor], outputs: int, inputs: int) -> PackedInt4:
        blocks, groups = -(-outputs // OUTPUTS), -(-inputs // GROUP)
        values = empty(blocks, groups, 4, OUTPUTS, dtype=torch.int32)
        scale = empty(blocks, groups, OUTPUTS, dtype=torch.float16)
        return cls(values, scale, inputs, empty(0).dtype, range(outputs))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), self.inputs))

    def split(self, sizes: list[int]) -> Sequence[PackedInt4]:
        ends = np.cumsum(sizes).tolist()
        parts = [self.rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return [replace(self, rows=rows) for rows in parts]

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
def simd_tile(sums_ptr, x_ptr, starts_ptr, weight_ptr, scale_ptr, groups, tokens):
    """Compute sums [tokens, 16] float32 of x [tokens, groups * 32] int8 times a block of weights.

    All are addresses. The sums of groups begin at starts [tokens, groups] int32.
    """
    t = 0
    while t < tokens:
        x = x_ptr + t * groups * GROUP
        starts, sums = starts_ptr + 4 * t * groups, sums_ptr + 4 * OUTPUTS * t
        if tokens - t >= TILE:
            int4_rows(LANES, TILE, x, starts, weight_ptr, scale_ptr, groups, sums)
            t += TILE
        elif tokens - t >= HALF_TILE:
            int4_rows(LANES, HALF_TILE, x, starts, weight_ptr, scale_ptr, groups, sums)
            t += HALF_TILE
        else:
            int4_rows(LANES, 1, x, starts, weight_ptr, scale_ptr, groups, sums)
            t += 1


@compiled()
def plain_tile(sums_ptr, x_ptr, starts_ptr, weight_ptr, scale_ptr, groups, tokens):
    """Compute the same as simd_tile."""
    sums = array(sums_ptr, (tokens, OUTPUTS), f32(0))
    x = array(x_ptr, (tokens, groups, GROUP), np.int8(0))
    starts = array(starts_ptr, (tokens, groups), np.int32(0))
    weight = array(weight_ptr, (groups, 4, OUTPUTS, 4), np.uint8(0))
    scale = array(scale_ptr, (groups, OUTPUTS), np.uint16(0))
    for t in range(tokens):
        sums[t] = 0
        for g in range(groups):
            for o in range(OUTPUTS):
                total = starts[t, g]
                for p in range(4):
                    for i in range(4):
                        both = np.int32(weight[g, p, o, i])
                        total += (both & 15) * np.int32(x[t, g, 4 * p + i])
                        total += (both >> 4) * np.int32(x[t, g, 16 + 4 * p + i])
                sums[t, o] += f32(total) * decode_float16(scale[g, o])


HAS_SIMD = has_feature("avx512vnni") or (has_feature("avx2") and has_feature("f16c"))
LANES = 16 if has_feature("avx512vnni") else 8
TILE = 8 if has_feature("avx512vnni") else 2  # tokens whose sums stay in registers
HALF_TILE = TILE // 2
tile = simd_tile if HAS_SIMD else plain_tile


@compiled(exact=True)
def finish(sums, token_scale, addend, out):
    """Compute out [N] = sums * token_scale + addend."""
    for c in range(len(out)):
        out[c] = from_float32(sums[c] * token_scale + addend[c], out[c])


@compiled(exact=True)
def int4_blocks(values, token_scale, starts, weight_ptr, scale_ptr, bias_ptr, out_ptr, outputs,
                example, start, stop):
    """Compute blocks [start, stop) of 16 outputs: values [T, I] int8 -> out [T, outputs]."""
    tokens, groups = starts.shape
    out = array(out_ptr, (tokens, outputs), example)
    bias = array(bias_ptr, (outputs,), example)
    sums, addend = np.empty((TOKEN_BLOCK, OUTPUTS), f32), np.zeros(OUTPUTS, f32)
    for first in range(0, tokens, TOKEN_BLOCK):
        rows = min(TOKEN_BLOCK, tokens - first)
        for block in range(start, stop):
            o = block * OUTPUTS
            count = min(OUTPUTS, outputs - o)
            if bias_ptr != 0:
                for c in range(count):
                    addend[c] = to_float32(bias[o + c])
            tile(np.int64(sums.ctypes.data), np.int64(values.ctypes.data) + first * groups * GROUP,
                 np.int64(starts.ctypes.data) + 4 * first * groups,
                 weight_ptr + o * groups * GROUP // 2, scale_ptr + 2 * o * groups, groups, rows)
            for i in range(rows):
                finish(sums[i], token_scale[first + i], addend, out[first + i, o : o + count])


@cache
def code(dtype: torch.dtype) -> tuple[int, ...]:
    """Return the addresses of the kernels that `product` calls."""
    return tuple(address_for(kernel, dtype, dtype) for kernel in (int8.quantize_rows, int4_blocks))


def linear(x: Tensor, module: Linear) -> Tensor:
    """Return x [T, I] in float32 or bfloat16 times the weight, in int4 or int8: [T, O]."""
    weight, bias = module.weight, module.bias
    if not isinstance(weight, PackedInt4):
        return int8.linear(x, module)
    outputs, inputs = weight.shape
    out = x.new_empty((len(x), outputs))
    addresses = (x.data_ptr(), weight.values.data_ptr(), weight.scale.data_ptr(),
                 0 if bias is None else bias.data_ptr(), out.data_ptr())
    sizes = len(x), inputs, outputs, GROUP, 8, OUTPUTS
    int8.product(code(x.dtype), *addresses, *sizes, DTYPE_EXAMPLE[x.dtype], get_num_threads())
    return out
