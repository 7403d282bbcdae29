"""Products of few rows with weights in int8: `weight_only` of backends/int8.py in one pass over W.

A product of few rows takes as long as reading its weights. Here they are read as int8 and converted
to the dtype of x in registers, which is exact; the scale of an output multiplies its float32 sum.
For many rows the products take longer than the weights: `linear` then multiplies in torch by parts
of the weights in the dtype of x, which stay in the GPU's L2 cache.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.gpu.kernels.conversions import int8_to
from nanovllm.backends.gpu.kernels.launch import launch
from nanovllm.models.layers import Linear


class Int8Tile(NamedTuple):
    """One program computes `num_outputs` for `num_rows`, and reads some inputs at a time.

    These are multiplied in `num_slices` products, one for each warp, or in a single one.
    """

    num_rows: int
    num_outputs: int
    num_inputs: int
    num_slices: int
    num_warps: int
    num_stages: int


# The keys are the largest numbers of rows; torch multiplies more rows. The sizes follow from
# shared memory and registers and have not been timed; those for float32 are small, because it uses
# no matrix units. A product of few rows has work for one warp. With one slice of the inputs for
# each of four warps, every weight is converted once, and not by every warp.
HALF = {
    16: Int8Tile(16, 16, 512, 4, 4, 3),
    32: Int8Tile(32, 32, 256, 4, 4, 3),
    64: Int8Tile(64, 32, 128, 4, 4, 3),
    512: Int8Tile(128, 64, 64, 1, 4, 3),  # up to four programs read the same weights, of 1 byte
}
FLOAT32 = {
    16: Int8Tile(16, 16, 64, 1, 4, 3),
    128: Int8Tile(32, 32, 32, 1, 4, 3),
}
# Weights that are converted at a time for torch: 32 MiB in half precision; an H100's L2 has 50 MiB.
PART = 2**24


# The sizes of a layer are no constants, so that all layers of a model share the compiled variants.
@triton.jit(do_not_specialize=["num_rows", "num_outputs", "num_inputs"])
def _int8_linear(
    x, weight, scale, bias, out, num_rows, num_outputs, num_inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SLICES: tl.constexpr,
    BIAS: tl.constexpr, ALIGNED: tl.constexpr,
):
    """One program computes ROWS x OUTPUTS of out = (x weight^T) * scale + bias.

    out [T, O], x [T, I], weight [O, I].

    ALIGNED: whether I is a multiple of 16, so that a load takes 16 bytes. The product is
    transposed, so that the converted weights are the operand that may be in registers.
    """
    dtype = x.dtype.element_ty
    if ALIGNED:
        num_inputs = num_inputs // 16 * 16  # the same number: the compiler sees what divides it
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, INPUTS // SLICES)
    weight_input, x_input = i[None, :], i[:, None]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if SLICES > 1:
        first = tl.arange(0, SLICES)[:, None, None] * (INPUTS // SLICES)
        weight_input, x_input = first + weight_input, first + x_input
        acc = tl.zeros([SLICES, OUTPUTS, ROWS], tl.float32)
    # A weight may have more than 2^31 elements.
    weight_ptrs = weight + output.to(tl.int64)[:, None] * num_inputs + weight_input
    x_ptrs = x + row.to(tl.int64)[None, :] * num_inputs + x_input
    is_output, is_row = (output < num_outputs)[:, None], (row < num_rows)[None, :]
    for start in range(0, num_inputs, INPUTS):
        is_input = weight_input < num_inputs - start
        w = tl.load(weight_ptrs + start, mask=is_output & is_input, other=0)
        is_input = x_input < num_inputs - start
        columns = tl.load(x_ptrs + start, mask=is_row & is_input, other=0.0)
        acc = tl.dot(int8_to(w, dtype), columns, acc, input_precision="ieee")
    if SLICES > 1:
        acc = tl.sum(acc, 0)
    acc *= tl.load(scale + output, mask=output < num_outputs, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out + row.to(tl.int64)[None, :] * num_outputs + output[:, None]
    tl.store(out_ptrs, acc.to(dtype), mask=is_row & is_output)


def linear(x: Tensor, module: Linear) -> Tensor:
    """Return x [T, I] times the weight, [T, O]. x is contiguous."""
    is_aligned = module.weight.shape[1] % 16 == 0
    return multiply(_int8_linear, x, module, module.weight.values, 1, ALIGNED=is_aligned)


def multiply(
    kernel: Any, x: Tensor, module: Linear, values: Tensor, min_inputs: int, **constants: int
) -> Tensor:
    """Launch `kernel` with the packed `values` of a weight; more rows are multiplied by torch."""
    weight, bias, rows = module.weight, module.bias, len(x)
    tiles = FLOAT32 if x.dtype == torch.float32 else HALF
    if rows > max(tiles):
        return linear_in_parts(x, module)
    tile = tiles[min(limit for limit in tiles if limit >= rows)]
    outputs, inputs = weight.shape
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    addend = weight.scale if bias is None else bias
    args = (x, values, weight.scale, addend, out, rows, outputs, inputs)
    sizes = dict(
        ROWS=tile.num_rows, OUTPUTS=tile.num_outputs, INPUTS=max(tile.num_inputs, min_inputs),
        SLICES=tile.num_slices, BIAS=bias is not None,
    )
    grid = (-(-outputs // tile.num_outputs), -(-rows // tile.num_rows), 1)
    options = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
    launch(kernel, grid, args, sizes | constants, **options)
    return out


def linear_in_parts(x: Tensor, module: Linear) -> Tensor:
    """Return the same by torch. Only a part of the weights exists in the dtype of x at a time."""
    weight, bias = module.weight, module.bias
    outputs, inputs = weight.shape
    size = max(1, PART // inputs)
    sizes = [min(size, outputs - start) for start in range(0, outputs, size)]
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    for y, part, addend in zip(out.split(sizes, 1), weight.split(sizes), biases, strict=True):
        w = part.dequantized().T
        if addend is None:
            torch.mm(x, w, out=y)
        else:
            torch.addmm(addend, x, w, out=y)
    return out
