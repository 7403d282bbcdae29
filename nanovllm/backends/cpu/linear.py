"""Linear layers on a CPU: weights in float32 and bfloat16, packed once, and their products.

A kernel reads a weight [O, I] in blocks of outputs, in the order in which it needs them. With plain
weights, a product of one token would read at many places of memory at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.backends.cpu.kernels.product import Product, multiply, padded_bytes, pointers
from nanovllm.backends.cpu.kernels.simd import float_product
from nanovllm.backends.cpu.memory import WeightMemory
from nanovllm.models.backend import num_experts
from nanovllm.models.layers import Linear


@dataclass(slots=True, frozen=True)
class PackedFloats:
    """Weights [X O, I] of X experts, or of one ordinary layer.

    A word of 4 bytes has n numbers: 2 in bfloat16, and 1 in float32. Outputs are padded with zeros
    to whole blocks of `width`, and inputs to whole words (with AMX, to 16 words).
    """

    values: Tensor  # [X, O / width, words, width, n]
    product: Product
    shape: torch.Size
    scale: None = None  # only quantized weights have scales

    @classmethod
    def of(cls, weight: Tensor, experts: int, memory: WeightMemory) -> PackedFloats:
        n = 4 // weight.itemsize
        outputs, inputs = weight.shape
        product = float_product(weight.dtype, inputs)
        width = product.width
        columns = padded_bytes(inputs, weight.itemsize) // weight.itemsize - inputs
        each = weight.view(experts, outputs // experts, inputs)
        each = (F.pad(each, (0, columns)) if columns else each).unflatten(2, (-1, n))
        blocks, rest = divmod(each.shape[1], width)
        shape = experts, blocks + (rest > 0), each.shape[2], width, n
        values = memory.empty(shape, weight.dtype).zero_()
        rows = values.transpose(2, 3)  # [X, blocks, width, words, n]
        rows[:, :blocks] = each[:, : blocks * width].unflatten(1, (blocks, width))
        if rest:
            rows[:, blocks, :rest] = each[:, -rest:]
        return cls(values, product, weight.shape)

    def unpack(self) -> Tensor:
        """Return the weights [X O, I]."""
        each = self.values.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return each[:, : self.shape[0] // len(each), : self.shape[1]].reshape(self.shape)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)


def pack(module: Linear, memory: WeightMemory) -> None:
    """Pack the weight of a Linear. The table of a tied head stays as it is for the embedding."""
    if isinstance(module.weight, Tensor):
        experts = num_experts(module.projections) or 1
        module.weight = PackedFloats.of(module.weight, experts, memory)


def linear(x: Tensor, module: Linear) -> Tensor:
    """Return x [T, I] in float32 or bfloat16 times a packed weight [O, I]: [T, O]."""
    weight = module.weight
    return multiply(weight.product, x, pointers(module), weight.shape[0])
