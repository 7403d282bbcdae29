"""Products with the weights of experts on a CPU, which expert_mlp.py calls.

Few rows of a step belong to the same expert, so a product takes as long as reading the weights of
the experts that have rows. One parallel loop computes all of them, because a loop for each expert
would wait for its threads each time. Its items are blocks of outputs of these experts, which the
kernels of other products compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels import int4, int8
from nanovllm.backends.cpu.kernels.parallel import call_at, code_at, in_parts
from nanovllm.backends.cpu.kernels.product import Product, quantized, quantized_bytes
from nanovllm.backends.cpu.kernels.units.unit import product_of, units
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


class ExpertWeights(NamedTuple):
    """The weights of all experts; addresses and sizes."""

    code: Product
    weight_ptr: int
    scale_ptr: int
    inputs: int
    outputs: int  # of an expert
    weight_bytes: int  # of an expert
    scale_bytes: int


@compiled()
def expert_blocks(code, x_ptr, weight_ptr, scale_ptr, out_ptr, hits, ends, inputs, outputs, width,
                  x_bytes, weight_bytes, scale_bytes, out_bytes, example, start, stop):
    """Compute blocks of out [N, outputs] from rows x of `x_bytes`, sorted by expert.

    `code` is the address of a kernel of blocks. Block b of expert hits[h] is item
    h * outputs / width + b. The weights of an expert take `weight_bytes`, its scales `scale_bytes`.
    """
    blocks = outputs // width
    for hit in range(start // blocks, (stop + blocks - 1) // blocks):
        expert, part = hits[hit], (max(start - hit * blocks, 0), min(stop - hit * blocks, blocks))
        for first in range(ends[expert - 1] if expert > 0 else 0, ends[expert], ROWS):
            arguments = (x_ptr + x_bytes * first, weight_ptr + weight_bytes * expert,
                         scale_ptr + scale_bytes * expert, np.int64(0), out_ptr + out_bytes * first,
                         min(ROWS, ends[expert] - first), inputs, outputs, example)
            call_at(code_at(code, arguments), (*arguments, *part))


@compiled()
def product(weights, blocks, x_ptr, out_ptr, work_ptr, hits, ends, itemsize, example, parts):
    """Multiply the sorted rows x [N, inputs] by the weights of their experts.

    `blocks` is the address of expert_blocks, and `work` has quantized rows.
    """
    code, inputs, outputs = weights.code, weights.inputs, weights.outputs
    x_ptr = quantized(code, x_ptr, ends[-1], inputs, work_ptr, example, parts)
    x_bytes = itemsize * inputs if code.quantize == 0 else quantized_bytes(inputs, code.group)
    arguments = (code.blocks, x_ptr, weights.weight_ptr, weights.scale_ptr, out_ptr, hits, ends,
                 inputs, outputs, code.width, x_bytes, weights.weight_bytes, weights.scale_bytes,
                 itemsize * outputs, example)
    in_parts(blocks, arguments, len(hits) * (outputs // code.width), parts)


def described(module: Linear, num_experts: int, dtype: torch.dtype) -> ExpertWeights:
    """Return the weights of a Linear as arguments of `product`. `dtype` is the dtype of x."""
    weight = module.weight
    outputs, inputs = weight.shape[0] // num_experts, weight.shape[1]
    if isinstance(weight, PackedExperts):
        code, scale, scale_bytes = product_of(units(dtype)[0]), 0, 0
    else:
        code = weight.product()
        scale, scale_bytes = weight.scale.data_ptr(), weight.scale.nbytes // num_experts
    weight_bytes = weight.values.nbytes // num_experts
    addresses = weight.values.data_ptr(), scale
    return ExpertWeights(code, *addresses, inputs, outputs, weight_bytes, scale_bytes)
