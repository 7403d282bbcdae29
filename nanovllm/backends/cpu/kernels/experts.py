"""Products with the weights of experts on a CPU, which expert_mlp.py calls.

Few rows of a step belong to the same expert, so a product takes as long as reading the weights of
the experts that have rows. One parallel loop computes all of them, because a loop for each expert
would wait for its threads each time. Its items are blocks of outputs of these experts. The kernels
of other products compute the blocks: units/ for float32 and bfloat16, int8.py and int4.py for
quantized weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba.extending import overload
from torch import Tensor

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels import int4, int8
from nanovllm.backends.cpu.kernels.parallel import address_for, call_at, code_at, in_parts
from nanovllm.backends.cpu.kernels.units.unit import units
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
    """Reorder the weights of experts in place, if a unit has a kernel for the result.

    The condition is the same for both Linears of a mixture: hidden and inner size in whole blocks.
    """
    weight, unit = module.weight, units(module.weight.dtype)[0]
    inputs, experts = weight.shape[1], num_experts(module.projections)
    sizes = inputs, *module.projections.values()
    if unit.linear_dtype is not weight.dtype or any(size % 64 for size in sizes):
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
    for hit in range(start // blocks, (stop + blocks - 1) // blocks):
        expert, part = hits[hit], (max(start - hit * blocks, 0), min(stop - hit * blocks, blocks))
        weight = weight_ptr + itemsize * inputs * outputs * expert
        for first in range(ends[expert - 1] if expert > 0 else 0, ends[expert], ROWS):
            rows = min(ROWS, ends[expert] - first)
            arguments = (x_ptr + itemsize * inputs * first, weight, np.int64(0),
                         out_ptr + itemsize * outputs * first, rows, inputs, outputs)
            call_at(code_at(code, arguments), (*arguments, *part))


@compiled()
def quantized_blocks(code, values, token_scale, starts, weight_ptr, scale_ptr, out_ptr, hits, ends,
                     outputs, width, weight_bytes, scale_bytes, out_bytes, example, start, stop):
    """Compute blocks of out [N, outputs] from quantized rows; see int8.quantize_tokens.

    `code` is the address of int8.product_blocks or int4.int4_blocks. The weights of an expert take
    `weight_bytes`, their scales `scale_bytes`, and a row of `out` takes `out_bytes`.
    """
    blocks = outputs // width
    for hit in range(start // blocks, (stop + blocks - 1) // blocks):
        expert, part = hits[hit], (max(start - hit * blocks, 0), min(stop - hit * blocks, blocks))
        first, last = ends[expert - 1] if expert > 0 else 0, ends[expert]
        arguments = (values[first:last], token_scale[first:last], starts[first:last],
                     weight_ptr + weight_bytes * expert, scale_ptr + scale_bytes * expert,
                     np.int64(0), out_ptr + out_bytes * first, outputs, example)
        call_at(code_at(code, arguments), (*arguments, *part))


class Packed(NamedTuple):
    """The weights of all experts in the dtype of x, for `product`; addresses and sizes."""

    kernel: int  # expert_blocks
    code: int  # linear_blocks of a unit
    weight_ptr: int
    inputs: int
    outputs: int  # of an expert
    width: int


class Quantized(NamedTuple):
    """The weights of all experts in int8 or int4, for `product`; addresses and sizes."""

    kernel: int  # quantized_blocks
    quantize: int  # int8.quantize_rows
    code: int  # int8.product_blocks or int4.int4_blocks
    weight_ptr: int
    scale_ptr: int
    inputs: int
    outputs: int  # of an expert
    width: int
    group: int  # inputs that share a scale
    offset: int  # of the stored values
    weight_bytes: int  # of an expert
    scale_bytes: int


def product(weight, x_ptr, out_ptr, hits, ends, itemsize, example, parts):
    """Multiply the sorted rows x [N, inputs] by the weights of their experts."""
    raise NotImplementedError("compiled code only")


@overload(product)
def _product(weight, x_ptr, out_ptr, hits, ends, itemsize, example, parts):
    def of_packed(weight, x_ptr, out_ptr, hits, ends, itemsize, example, parts):
        arguments = (weight.code, x_ptr, weight.weight_ptr, out_ptr, hits, ends, weight.inputs,
                     weight.outputs, weight.width, itemsize)
        in_parts(weight.kernel, arguments, len(hits) * (weight.outputs // weight.width), parts)

    def of_quantized(weight, x_ptr, out_ptr, hits, ends, itemsize, example, parts):
        rows = int8.quantize_tokens(weight.quantize, x_ptr, ends[-1], weight.inputs, weight.group,
                                    weight.offset, example, parts)
        arguments = (weight.code, *rows, weight.weight_ptr, weight.scale_ptr, out_ptr, hits, ends,
                     weight.outputs, weight.width, weight.weight_bytes, weight.scale_bytes,
                     itemsize * weight.outputs, example)
        in_parts(weight.kernel, arguments, len(hits) * (weight.outputs // weight.width), parts)

    return of_packed if weight.instance_class is Packed else of_quantized


@cache
def codes(kernels: tuple[Any, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the addresses of kernels in the dtype of a model."""
    return tuple(address_for(kernel, dtype, dtype) for kernel in kernels)


def described(module: Linear, num_experts: int, dtype: torch.dtype) -> Packed | Quantized:
    """Return the weights of a Linear as arguments of `product`. `dtype` is the dtype of x."""
    weight = module.weight
    outputs, inputs = weight.shape[0] // num_experts, weight.shape[1]
    if isinstance(weight, PackedExperts):
        code = codes((expert_blocks, units(dtype)[0].linear_blocks), dtype)
        address = weight.values.data_ptr()
        return Packed._make((*code, address, inputs, outputs, weight.width))
    kind: Any = int8
    group, offset, width = -(-inputs // 4) * 4, 128, int8.OUTPUTS
    if isinstance(weight, int4.PackedInt4):
        kind, group, offset, width = int4, GROUP, 8, int4.OUTPUTS
    parts = weight.values, weight.scale
    code = *codes((quantized_blocks,), dtype), *kind.code(dtype)
    addresses = *(part.data_ptr() for part in parts), inputs, outputs, width, group, offset
    return Quantized._make((*code, *addresses, *(part.nbytes // num_experts for part in parts)))
