"""Products with the weights of experts on a GPU: `expert_linear` of features/models/moe/experts.py.

The rows of an expert are divided into tiles, and a program computes some outputs of a tile. How
many tiles there are depends on the router, and the host must not wait for that. The grid therefore
has as many tiles as N rows can have at most. Each program finds its expert and its rows from the
ends of all experts, and those without rows return. The number of programs depends only on N, so
that a CUDA graph can contain the launch.

The weights are in the dtype of x, in int8 or in int4, which are multiplied as in int8.py and
int4.py. A byte of int4 is loaded for both of its halves, the second time from a cache.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.gpu.kernels.launch import launch
from nanovllm.backends.int4 import GROUP, Int4Weight
from nanovllm.backends.int8 import Int8Weight
from nanovllm.models.layers import Linear


class ExpertTile(NamedTuple):
    """One program computes `num_outputs` for `num_rows`, and reads some inputs at a time."""

    num_rows: int
    num_outputs: int
    num_inputs: int
    num_warps: int
    num_stages: int


# FEW is for few rows of an expert, MANY for many. The sizes follow from shared memory and
# registers: on sm_80 three programs of MANY fit a multiprocessor, and with 128 rows and 8 warps
# one. No sizes were timed.
FEW, MANY = ExpertTile(16, 16, 128, 4, 4), ExpertTile(64, 64, 32, 4, 3)
FLOAT32 = ExpertTile(32, 32, 32, 4, 3)  # it uses no matrix units


def select_tile(dtype: torch.dtype, num_rows: int, num_experts: int) -> ExpertTile:
    """Return the tile for an average number of rows. An expert may have twice as many."""
    if dtype == torch.float32:
        return FLOAT32
    return FEW if 2 * num_rows <= FEW.num_rows * num_experts else MANY


def max_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """Return how many tiles the rows have at most.

    The first row of each expert starts a tile, and so do `tile_rows` other rows of an expert.
    """
    hits = min(num_rows, num_experts)
    return hits + (num_rows - hits) // tile_rows


@triton.jit(
    do_not_specialize=["num_experts", "num_outputs", "num_inputs"],
    do_not_specialize_on_alignment=["ends"],
)
def _expert_linear(
    x, weight, scale, ends, out, num_experts, num_outputs, num_inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EXPERTS: tl.constexpr,
    GROUP: tl.constexpr, ALIGNED: tl.constexpr,
):
    """One program computes ROWS x OUTPUTS of the product of an expert.

    out [N, O], x [N, I], ends [X] int64. weight [X O, I], or [X O, G, GROUP / 2] uint8 in int4.
    scale [X O] float32 in int8, [X O, G] float16 in int4.

    EXPERTS: a power of two that is at least X.
    ALIGNED: whether I is a multiple of the group, so that a load takes 16 bytes. The product is
    transposed, so that the converted weights are the operand that may be in registers.
    """
    dtype = x.dtype.element_ty
    IS_INT4: tl.constexpr = weight.dtype.element_ty == tl.uint8
    number = tl.arange(0, EXPERTS)
    # Numbers from X on get no rows.
    end = tl.load(ends + tl.minimum(number, num_experts - 1)).to(tl.int32)
    begin = tl.load(ends + tl.minimum(number, num_experts) - 1, mask=number > 0, other=0)
    begin = begin.to(tl.int32)
    tiles = (end - begin + ROWS - 1) // ROWS
    tiles_end = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    expert = tl.sum((tiles_end <= tile).to(tl.int32), 0)
    if expert >= num_experts:
        return
    mine = number == expert
    tile -= tl.sum(tl.where(mine, tiles_end - tiles, 0), 0)
    row = tl.sum(tl.where(mine, begin, 0), 0) + tile * ROWS + tl.arange(0, ROWS)
    is_row = (row < tl.sum(tl.where(mine, end, 0), 0))[None, :]

    if ALIGNED:
        num_inputs = num_inputs // GROUP * GROUP  # the same: the compiler sees what divides it
    num_groups = (num_inputs + GROUP - 1) // GROUP
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = (output < num_outputs)[:, None]
    # A weight may have more than 2^31 elements.
    weight_row = expert.to(tl.int64) * num_outputs + output
    i = tl.arange(0, INPUTS)
    if IS_INT4:
        byte = i // GROUP * (GROUP // 2) + i % (GROUP // 2)
        weight_ptrs = weight + weight_row[:, None] * (num_groups * (GROUP // 2)) + byte[None, :]
        shift = (i % GROUP // (GROUP // 2) * 4)[None, :]
        scale_ptrs = scale + weight_row[:, None] * num_groups + (i // GROUP)[None, :]
    else:
        weight_ptrs = weight + weight_row[:, None] * num_inputs + i[None, :]
    x_ptrs = x + row.to(tl.int64)[None, :] * num_inputs + i[:, None]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, num_inputs, INPUTS):
        is_input = i < num_inputs - start
        is_weight = is_output & is_input[None, :]
        if IS_INT4:
            both = tl.load(weight_ptrs + start // 2, mask=is_weight, other=0)
            s = tl.load(scale_ptrs + start // GROUP, mask=is_weight, other=0.0).to(tl.float32)
            w = ((both.to(tl.int32) >> shift & 15) - 8).to(tl.float32) * s
        else:
            w = tl.load(weight_ptrs + start, mask=is_weight, other=0)
        columns = tl.load(x_ptrs + start, mask=is_row & is_input[:, None], other=0.0)
        acc = tl.dot(w.to(dtype), columns, acc, input_precision="ieee")
    if weight.dtype.element_ty == tl.int8:
        acc *= tl.load(scale + weight_row, mask=output < num_outputs, other=0.0)[:, None]
    out_ptrs = out + row.to(tl.int64)[None, :] * num_outputs + output[:, None]
    tl.store(out_ptrs, acc.to(dtype), mask=is_row & is_output)


def expert_linear(x: Tensor, module: Linear, ends: Tensor) -> Tensor:
    """Multiply the sorted rows x [N, I] by the weights of their experts. Returns [N, O].

    x is contiguous, and N is at least 1.
    """
    weight, num_experts = module.weight, len(ends)
    values = scale = weight
    if isinstance(weight, Int8Weight):
        values, scale = weight.values, weight.scale
    elif isinstance(weight, Int4Weight):
        values, scale = weight.values.view(torch.uint8), weight.scale
    (rows, inputs), outputs = x.shape, weight.shape[0] // num_experts
    tile = select_tile(x.dtype, rows, num_experts)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    constants = dict(
        ROWS=tile.num_rows, OUTPUTS=tile.num_outputs, INPUTS=tile.num_inputs,
        EXPERTS=triton.next_power_of_2(num_experts), GROUP=GROUP, ALIGNED=inputs % GROUP == 0,
    )
    grid = (max_tiles(rows, num_experts, tile.num_rows), -(-outputs // tile.num_outputs), 1)
    options = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
    args = (x, values, scale, ends, out, num_experts, outputs, inputs)
    launch(_expert_linear, grid, args, constants, **options)
    return out
