"""Products of few rows with weights in int4: `weight_only` of backends/int4.py in one pass over W.

As in int8.py, the weights are converted to the dtype of x in registers. The halves of a byte belong
to different inputs of a group, so each program multiplies the low halves by inputs 0 to 15 of the
groups and the high halves by inputs 16 to 31. A scale belongs to a group, so it multiplies the
weights and not the sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.gpu.kernels import int8
from nanovllm.backends.int4 import GROUP, Int4Weight
from nanovllm.models.layers import Linear


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "num_inputs"])
def _int4_linear(
    x, weight, scale, bias, out, num_rows, num_outputs, num_inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SLICES: tl.constexpr,
    BIAS: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr,
):
    """One program computes ROWS x OUTPUTS of out = x weight^T + bias.

    out [T, O], x [T, I], weight [O, G, GROUP / 2] uint8, scale [O, G] float16.

    A step of the loop reads INPUTS / 2 bytes of each output, which are INPUTS / GROUP groups.
    ALIGNED: whether I is a multiple of the group, so that a load of x takes 16 bytes.
    """
    dtype = x.dtype.element_ty
    HALF: tl.constexpr = GROUP // 2
    if ALIGNED:
        num_inputs = num_inputs // GROUP * GROUP  # the same: the compiler sees what divides it
    num_groups = (num_inputs + GROUP - 1) // GROUP
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    byte = tl.arange(0, INPUTS // 2 // SLICES)
    weight_byte, x_byte = byte[None, :], byte[:, None]
    # Each half has an accumulator: two products of a loop that add to the same one are compiled
    # wrongly for tcgen05, the matrix units of sm_100 (triton-lang/triton#10821).
    low_acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if SLICES > 1:
        first = tl.arange(0, SLICES)[:, None, None] * (INPUTS // 2 // SLICES)
        weight_byte, x_byte = first + weight_byte, first + x_byte
        low_acc = tl.zeros([SLICES, OUTPUTS, ROWS], tl.float32)
    high_acc = low_acc
    group = weight_byte // HALF
    # A weight may have more than 2^31 elements.
    weight_ptrs = weight + output.to(tl.int64)[:, None] * (num_groups * HALF) + weight_byte
    scale_ptrs = scale + output.to(tl.int64)[:, None] * num_groups + group
    low = x_byte // HALF * GROUP + x_byte % HALF  # the input of the low half of a byte
    x_ptrs = x + row.to(tl.int64)[None, :] * num_inputs + low
    is_output, is_row = (output < num_outputs)[:, None], (row < num_rows)[None, :]
    for start in range(0, num_inputs, INPUTS):
        is_group = is_output & (group < num_groups - start // GROUP)
        both = tl.load(weight_ptrs + start // 2, mask=is_group, other=0)
        s = tl.load(scale_ptrs + start // GROUP, mask=is_group, other=0.0).to(tl.float32)
        for high in tl.static_range(2):
            value = ((both >> 4) if high else (both & 15)).to(tl.int32) - 8
            w = (value.to(tl.float32) * s).to(dtype)
            is_input = low + high * HALF < num_inputs - start
            columns = tl.load(x_ptrs + start + high * HALF, mask=is_row & is_input, other=0.0)
            if high:
                high_acc = tl.dot(w, columns, high_acc, input_precision="ieee")
            else:
                low_acc = tl.dot(w, columns, low_acc, input_precision="ieee")
    acc = low_acc + high_acc
    if SLICES > 1:
        acc = tl.sum(acc, 0)
    if BIAS:
        acc += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out + row.to(tl.int64)[None, :] * num_outputs + output[:, None]
    tl.store(out_ptrs, acc.to(dtype), mask=is_row & is_output)


def linear(x: Tensor, module: Linear) -> Tensor:
    """Return x [T, I] times the weight in int4, or the head in int8: [T, O]."""
    weight = module.weight
    if not isinstance(weight, Int4Weight):
        return int8.linear(x, module)
    packed, constants = weight.values.view(torch.uint8), dict(GROUP=GROUP)
    constants["ALIGNED"] = weight.shape[1] % GROUP == 0
    return int8.multiply(_int4_linear, x, module, packed, GROUP, **constants)
