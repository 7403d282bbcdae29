"""Products with quantized weights, and with the weights of experts, in one pass over the weights.

A product of few rows takes as long as reading its weights. They are read as they are stored and
converted to the dtype of x in registers. The conversion of int8 is exact, and the scale of an
output multiplies its float32 sum. In int4 a scale belongs to a group and multiplies the weights.
The halves of a byte of int4 belong to different inputs of a group, so the low halves are multiplied
by inputs 0 to 15 of the groups, and the high halves by inputs 16 to 31. For many rows the products
take longer than the weights: torch then multiplies by parts of the weights in the dtype of x, which
stay in the GPU's L2 cache. The reference is `weight_only` in backends/int8.py.

The rows of experts are sorted by expert and divided into tiles, and weights may also be in the
dtype of x: `expert_linear` of features/models/moe/experts.py. How many tiles there are depends on
the router, and the host must not wait for that. The grid has as many tiles as N rows can have at
most. Each program finds its expert and its rows from the ends of all experts, and those without
rows return. The number of programs depends only on N, so that a CUDA graph can contain the launch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from nanovllm.backends.gpu.kernels.conversions import int8_to
from nanovllm.backends.gpu.kernels.launch import launch
from nanovllm.backends.int4 import GROUP_SIZE, PART, Int4Weight
from nanovllm.backends.int8 import Int8Weight
from nanovllm.models.layers import Linear


class LinearTile(NamedTuple):
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
    16: LinearTile(16, 16, 512, 4, 4, 3),
    32: LinearTile(32, 32, 256, 4, 4, 3),
    64: LinearTile(64, 32, 128, 4, 4, 3),
    512: LinearTile(128, 64, 64, 1, 4, 3),  # up to four programs read the same weights, of 1 byte
}
FLOAT32 = {
    16: LinearTile(16, 16, 64, 1, 4, 3),
    128: LinearTile(32, 32, 32, 1, 4, 3),
}
# Of experts: FEW is for few rows of an expert, MANY for many. On sm_80 three programs of MANY fit a
# multiprocessor, and with 128 rows and 8 warps one.
FEW, MANY = LinearTile(16, 16, 128, 1, 4, 4), LinearTile(64, 64, 32, 1, 4, 3)
EXPERTS_FLOAT32 = LinearTile(32, 32, 32, 1, 4, 3)


@triton.jit
def _expert_rows(ends, tile, num_experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """(expert of a tile, its rows [ROWS], the end of the expert's rows). EXPERTS: a power of 2."""
    number = tl.arange(0, EXPERTS)
    # Numbers from num_experts on get no rows.
    end = tl.load(ends + tl.minimum(number, num_experts - 1)).to(tl.int32)
    begin = tl.load(ends + tl.minimum(number, num_experts) - 1, mask=number > 0, other=0)
    begin = begin.to(tl.int32)
    tiles = (end - begin + ROWS - 1) // ROWS
    tiles_end = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_end <= tile).to(tl.int32), 0)
    mine = number == expert
    tile -= tl.sum(tl.where(mine, tiles_end - tiles, 0), 0)
    row = tl.sum(tl.where(mine, begin, 0), 0) + tile * ROWS + tl.arange(0, ROWS)
    return expert, row, tl.sum(tl.where(mine, end, 0), 0)


# The sizes of a layer are no constants, so that all layers of a model share the compiled variants.
@triton.jit(
    do_not_specialize=["num_rows", "num_experts", "num_outputs", "num_inputs"],
    do_not_specialize_on_alignment=["ends"],
)
def _linear(
    x, weight, scale, bias, ends, out, num_rows, num_experts, num_outputs, num_inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SLICES: tl.constexpr,
    EXPERTS: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, ALIGNED: tl.constexpr,
):
    """One program computes ROWS x OUTPUTS of out = x weight^T + bias, of one expert if EXPERTS > 0.

    out [N, O], x [N, I], ends [X] int64. weight [O, I], or [O, G, GROUP / 2] uint8 in int4, or X
    times as many rows. scale [O] float32 in int8, [O, G] float16 in int4.

    ALIGNED: whether I is a multiple of GROUP, so that a load takes 16 bytes. The product is
    transposed, so that the converted weights are the operand that may be in registers.
    """
    dtype = x.dtype.element_ty
    IS_INT4: tl.constexpr = weight.dtype.element_ty == tl.uint8
    HALF: tl.constexpr = GROUP // 2
    PER_BYTE: tl.constexpr = 2 if IS_INT4 else 1  # numbers of a weight at one address
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    weight_row = output.to(tl.int64)  # a weight may have more than 2^31 elements
    row, end = tl.program_id(1) * ROWS + tl.arange(0, ROWS), num_rows
    if EXPERTS > 0:
        expert, row, end = _expert_rows(ends, tl.program_id(1), num_experts, ROWS, EXPERTS)
        if expert >= num_experts:
            return
        weight_row += expert.to(tl.int64) * num_outputs
    if ALIGNED:
        num_inputs = num_inputs // GROUP * GROUP  # the same: the compiler sees what divides it
    columns = num_inputs  # of the stored weights
    if IS_INT4:
        columns = (num_inputs + GROUP - 1) // GROUP * HALF
    column = tl.arange(0, INPUTS // PER_BYTE // SLICES)
    weight_column, x_column = column[None, :], column[:, None]
    # Each half has an accumulator: two products of a loop that add to the same one are compiled
    # wrongly for tcgen05, the matrix units of sm_100 (triton-lang/triton#10821).
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if SLICES > 1:
        first = tl.arange(0, SLICES)[:, None, None] * (INPUTS // PER_BYTE // SLICES)
        weight_column, x_column = first + weight_column, first + x_column
        acc = tl.zeros([SLICES, OUTPUTS, ROWS], tl.float32)
    high_acc = acc
    group = weight_column // HALF
    weight_ptrs = weight + weight_row[:, None] * columns + weight_column
    scale_ptrs = scale + weight_row[:, None] * (columns // HALF) + group
    x_input = x_column
    if IS_INT4:
        x_input = x_column // HALF * GROUP + x_column % HALF  # the input of the low half of a byte
    x_ptrs = x + row.to(tl.int64)[None, :] * num_inputs + x_input
    is_output, is_row = (output < num_outputs)[:, None], (row < end)[None, :]
    for start in range(0, num_inputs, INPUTS):
        is_weight = is_output & (weight_column < columns - start // PER_BYTE)
        stored = tl.load(weight_ptrs + start // PER_BYTE, mask=is_weight, other=0)
        if IS_INT4:
            s = tl.load(scale_ptrs + start // GROUP, mask=is_weight, other=0.0).to(tl.float32)
        for high in tl.static_range(PER_BYTE):
            is_input = x_input + high * HALF < num_inputs - start
            inputs = tl.load(x_ptrs + start + high * HALF, mask=is_row & is_input, other=0.0)
            if IS_INT4:
                value = ((stored >> 4) if high else (stored & 15)).to(tl.int32) - 8
                w = (value.to(tl.float32) * s).to(dtype)
            elif weight.dtype.element_ty == tl.int8:
                w = int8_to(stored, dtype)
            else:
                w = stored
            if high:
                high_acc = tl.dot(w, inputs, high_acc, input_precision="ieee")
            else:
                acc = tl.dot(w, inputs, acc, input_precision="ieee")
    if IS_INT4:
        acc += high_acc
    if SLICES > 1:
        acc = tl.sum(acc, 0)
    if weight.dtype.element_ty == tl.int8:
        acc *= tl.load(scale + weight_row, mask=output < num_outputs, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out + row.to(tl.int64)[None, :] * num_outputs + output[:, None]
    tl.store(out_ptrs, acc.to(dtype), mask=is_row & is_output)


def linear(x: Tensor, module: Linear) -> Tensor:
    """Return x [T, I] times the weight in int8 or int4: [T, O]. x is contiguous."""
    tiles = FLOAT32 if x.dtype == torch.float32 else HALF
    if len(x) > max(tiles):
        return linear_in_parts(x, module)
    tile = tiles[min(limit for limit in tiles if limit >= len(x))]
    return multiply(x, module.weight, module.bias, tile, -(-len(x) // tile.num_rows))


def invariant_linear(x: Tensor, module: Linear) -> Tensor:
    """Return x [T, I] times the weight in the dtype of x. A row has the same bits for any T."""
    return multiply(x, module.weight, module.bias, MANY, -(-len(x) // MANY.num_rows))


def multiply(
    x: Tensor, weight: Tensor | Int8Weight | Int4Weight, bias: Tensor | None, tile: LinearTile,
    num_tiles: int, ends: Tensor | None = None,
) -> Tensor:
    """Launch `_linear` for `num_tiles` tiles of rows, of experts if `ends` are given."""
    values = scale = weight
    if isinstance(weight, Int8Weight):
        values, scale = weight.values, weight.scale
    elif isinstance(weight, Int4Weight):
        values, scale = weight.values.view(torch.uint8), weight.scale
    rows, inputs = x.shape
    num_experts = 0 if ends is None else len(ends)
    outputs = weight.shape[0] // max(1, num_experts)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    args = (
        x, values, scale, scale if bias is None else bias, scale if ends is None else ends, out,
        rows, num_experts, outputs, inputs,
    )
    constants = dict(
        ROWS=tile.num_rows, OUTPUTS=tile.num_outputs, INPUTS=tile.num_inputs,
        SLICES=tile.num_slices, EXPERTS=triton.next_power_of_2(num_experts), GROUP=GROUP_SIZE,
        BIAS=bias is not None, ALIGNED=inputs % GROUP_SIZE == 0,
    )
    options = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
    launch(_linear, (-(-outputs // tile.num_outputs), num_tiles, 1), args, constants, **options)
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
        y.copy_(F.linear(x, part.dequantized(), addend))
    return out


def select_tile(dtype: torch.dtype, num_rows: int, num_experts: int) -> LinearTile:
    """Return the tile for an average number of rows. An expert may have twice as many."""
    if dtype == torch.float32:
        return EXPERTS_FLOAT32
    return FEW if 2 * num_rows <= FEW.num_rows * num_experts else MANY


def max_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """Return how many tiles the rows have at most.

    The first row of each expert starts a tile, and so do `tile_rows` other rows of an expert.
    """
    hits = min(num_rows, num_experts)
    return hits + (num_rows - hits) // tile_rows


def expert_linear(x: Tensor, module: Linear, ends: Tensor) -> Tensor:
    """Multiply the sorted rows x [N, I] by the weights of their experts. Returns [N, O].

    x is contiguous, and N is at least 1.
    """
    tile = select_tile(x.dtype, len(x), len(ends))
    num_tiles = max_tiles(len(x), len(ends), tile.num_rows)
    return multiply(x, module.weight, None, tile, num_tiles, ends)
