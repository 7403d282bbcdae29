"""Products with the weights of experts on a CPU: `expert_linear` of features/moe/experts.py.

Few rows of a step belong to the same expert, so a product takes as long as reading the weights of
the experts that have rows. One parallel loop computes all of them, because a loop for each expert
would wait for its threads each time. Its items are blocks of outputs of these experts. The kernels
of other products compute a block: units/ for bfloat16, int8.py and int4.py for quantized weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numba import get_num_threads
from torch import Tensor

from nanovllm.backends.cpu import int4, int8
from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.parallel import address_for, address_of, call_at, code_at, in_parts
from nanovllm.backends.cpu.primitives import DTYPE_EXAMPLE
from nanovllm.backends.cpu.units.unit import units
from nanovllm.backends.int4 import GROUP
from nanovllm.models.backend import num_experts
from nanovllm.models.layers import Linear

# Rows of an expert that are computed together, while a block of weights stays in the caches.
ROWS = 64


def check_sizes(outputs: int, names: list[str], block: int) -> None:
    """Raise ValueError if a block of outputs of a quantized weight would belong to two experts."""
    if (experts := num_experts(names)) and outputs // experts % block:
        raise ValueError(
            f"quantized experts on a CPU need a multiple of {block} outputs, and {names[0]} with "
            f"its neighbors has {outputs // experts}; leave quantization out, or set "
            "attention_backend='sdpa'"
        )


@dataclass(slots=True, frozen=True)
class PackedExperts:
    """Weights [X O, I] in blocks of `width` outputs that a unit reads."""

    values: Tensor  # [X O / width, I / n, width, n], where n is 2 in bfloat16 and 1 in float32
    width: int

    @property
    def shape(self) -> torch.Size:
        blocks, steps, width, n = self.values.shape
        return torch.Size((blocks * width, steps * n))

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


def pack(module: Linear) -> None:
    """Reorder the weights of experts in place, if a unit has a kernel for the result."""
    weight, unit = module.weight, units(module.weight.dtype)[0]
    (outputs, inputs), experts = weight.shape, num_experts(module.projections)
    if unit.linear_dtype is not weight.dtype or outputs // experts % unit.width or inputs % 64:
        return
    n = 4 // weight.itemsize
    for expert in weight.chunk(experts):  # one at a time, to save memory
        blocks = expert.view(-1, unit.width, inputs // n, n).transpose(1, 2)
        expert.copy_(blocks.contiguous().view_as(expert))
    module.weight = PackedExperts(weight.view(-1, inputs // n, unit.width, n), unit.width)


def is_packed(module: Linear) -> bool:
    return isinstance(module.weight, (PackedExperts, int8.PackedWeight, int4.PackedInt4))


@compiled()
def expert_blocks(code, x_ptr, weight_ptr, out_ptr, hits, ends, inputs, outputs, width, itemsize,
                  start, stop):
    """Compute blocks of out [N, outputs] from x [N, inputs], all in one dtype.

    `code` is the address of a unit's linear_blocks. Block b of expert hits[h] is item
    h * outputs / width + b.
    """
    blocks = outputs // width
    for item in range(start, stop):
        expert, block = hits[item // blocks], item % blocks
        weight = weight_ptr + itemsize * inputs * outputs * expert
        for first in range(ends[expert - 1] if expert > 0 else 0, ends[expert], ROWS):
            rows = min(ROWS, ends[expert] - first)
            arguments = (x_ptr + itemsize * inputs * first, weight, np.int64(0),
                         out_ptr + itemsize * outputs * first, rows, inputs, outputs)
            call_at(code_at(code, arguments), (*arguments, block, block + 1))


@compiled()
def quantized_blocks(code, values, token_scale, starts, weight_ptr, scale_ptr, out_ptr, hits, ends,
                     outputs, width, weight_bytes, scale_bytes, out_bytes, example, start, stop):
    """Compute blocks of out [N, outputs] from quantized rows; see int8.quantize_tokens.

    `code` is the address of int8.product_blocks or int4.int4_blocks. The weights of an expert take
    `weight_bytes`, their scales `scale_bytes`, and a row of `out` takes `out_bytes`.
    """
    blocks = outputs // width
    for item in range(start, stop):
        expert, block = hits[item // blocks], item % blocks
        first, last = ends[expert - 1] if expert > 0 else 0, ends[expert]
        arguments = (values[first:last], token_scale[first:last], starts[first:last],
                     weight_ptr + weight_bytes * expert, scale_ptr + scale_bytes * expert,
                     np.int64(0), out_ptr + out_bytes * first, outputs, example)
        call_at(code_at(code, arguments), (*arguments, block, block + 1))


@cache
def unit_code(dtype: torch.dtype) -> int:
    """Return the address of the kernel that `expert_blocks` calls."""
    return address_for(units(dtype)[0].linear_blocks, dtype, dtype)


def expert_linear(x: Tensor, module: Linear, ends: Tensor) -> Tensor:
    """Multiply the sorted rows x [N, I] by the packed weights of their experts -> [N, O]."""
    weight, last = module.weight, ends.numpy()
    hits = np.flatnonzero(last - np.append(0, last[:-1]))
    (outputs, inputs), parts = weight.shape, get_num_threads()
    outputs //= len(last)
    out, example = x.new_empty((len(x), outputs)), DTYPE_EXAMPLE[x.dtype]
    if isinstance(weight, PackedExperts):
        kernel, width = expert_blocks, weight.width
        arguments = (unit_code(x.dtype), x.data_ptr(), weight.values.data_ptr(), out.data_ptr(),
                     hits, last, inputs, outputs, width, x.itemsize)
    else:
        kernel, group, offset, width = quantized_blocks, -(-inputs // 4) * 4, 128, int8.OUTPUTS
        quantize, code = int8.code(x.dtype)
        if isinstance(weight, int4.PackedInt4):
            group, offset, width = GROUP, 8, int4.OUTPUTS
            quantize, code = int4.code(x.dtype)
        rows = int8.quantize_tokens(quantize, x.data_ptr(), *x.shape, group, offset, example, parts)
        sizes = weight.values.nbytes // len(last), weight.scale.nbytes // len(last), out[:1].nbytes
        arguments = (code, *rows, weight.values.data_ptr(), weight.scale.data_ptr(), out.data_ptr(),
                     hits, last, outputs, width, *sizes, example)
    in_parts(address_of(kernel, arguments), arguments, len(hits) * (outputs // width), parts)
    return out
