"""Gathers the inputs of a decode step from the row tensors, in one launch.

The reference is in backends/gpu/decode_inputs.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.gpu.decode_inputs import DecodeInputs
from nanovllm.backends.gpu.kernels.launch import launch
from nanovllm.plan import FILTERS

# A program copies this many blocks of a block table at a time.
BLOCKS = tl.constexpr(1024)


@triton.jit(
    do_not_specialize=["num_rows", "max_blocks"],
    do_not_specialize_on_alignment=[
        "rows", "out_ids", "out_positions", "out_slots", "out_lens", "out_seeds",
    ],
)
def _decode_inputs(
    rows, block_tables, positions, row_params, seeds, last_tokens,
    out_ids, out_positions, out_slots, out_lens, out_tables, out_params, out_ints, out_seeds,
    num_rows, max_blocks, BLOCK: tl.constexpr, PARAMS: tl.constexpr,
):
    """One program reads one row and advances its position. Row `num_rows` is padding."""
    i, size = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    row = tl.load(rows + i)
    position = tl.load(positions + row)
    context_len = position + 1
    # Several programs may read the padding row, whose position therefore stays 0.
    tl.store(positions + row, context_len, mask=row < num_rows)
    block_tables += row * max_blocks
    slot = tl.load(block_tables + position // BLOCK).to(tl.int64) * BLOCK + position % BLOCK
    tl.store(out_ids + i, tl.load(last_tokens + row))
    tl.store(out_positions + i, position)
    tl.store(out_slots + i, slot)
    tl.store(out_lens + i, context_len)
    tl.store(out_seeds + i, tl.load(seeds + row))
    param = tl.arange(0, triton.next_power_of_2(PARAMS))
    in_range = param < PARAMS
    value = tl.load(row_params + param * (num_rows + 1) + row, mask=in_range, other=0.0)
    tl.store(out_params + param * size + i, value, mask=in_range)
    tl.store(out_ints + param * size + i, value.to(tl.int64), mask=in_range)
    num_blocks = tl.cdiv(context_len, BLOCK).to(tl.int32)
    for start in range(0, num_blocks, BLOCKS):
        index = start + tl.arange(0, BLOCKS)
        block = tl.load(block_tables + index, mask=index < num_blocks, other=0)
        tl.store(out_tables + i * max_blocks + index, block, mask=index < num_blocks)


def decode_inputs(
    rows: Tensor, block_tables: Tensor, positions: Tensor, params: Tensor, seeds: Tensor,
    last_tokens: Tensor, block_size: int,
) -> DecodeInputs:
    """Read what a decode of `rows` [S] needs, and advance their positions.

    block_tables [N + 1, B] int32; positions, seeds, last_tokens [N + 1] int64; params [P, N + 1].
    All tensors are contiguous. The position of row N, which is padding, is 0.
    """
    size, (num_rows, max_blocks), device = len(rows), block_tables.shape, rows.device
    numbers = torch.empty((5, size), dtype=torch.int64, device=device)
    tables = torch.empty((size, max_blocks), dtype=torch.int32, device=device)
    values = torch.empty((len(params), size), dtype=torch.float32, device=device)
    ints = torch.empty_like(values, dtype=torch.int64)
    ids, at, slots, lens, out_seeds = numbers
    args = (
        rows, block_tables, positions, params, seeds, last_tokens,
        ids, at, slots, lens, tables, values, ints, out_seeds, num_rows - 1, max_blocks,
    )
    constants = dict(BLOCK=block_size, PARAMS=len(params))
    launch(_decode_inputs, (size, 1, 1), args, constants, num_warps=4)
    filters = [isinstance(off, int) for off in FILTERS.values()]
    typed = [ints[i] if is_int else values[i] for i, is_int in enumerate([False, *filters])]
    return DecodeInputs(ids, at, slots, lens, tables, typed, out_seeds)
