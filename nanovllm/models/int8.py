"""Weights of linear layers in int8, quantized while they are loaded: quantization="int8".

A weight W [O, I] is stored as `values` in int8 with one float32 `scale` for each output, so that
W is about values * scale. The two products are the references of the kernels in gpu/ and cpu/:

    weight_only   y = x W^T, in the dtype of x. On a GPU: few rows take as long as reading W, and
                  int8 halves that. Nothing but the weights is rounded.
    dynamic       y = (q values^T) * token scale * scale, where x is about q * token scale. On a
                  CPU, whose instructions for int8 multiply twice as many numbers as those for
                  bfloat16. The product of integers is exact, and each token has a scale of its own,
                  so the result for a token does not depend on the rest of the batch.

Both roundings are symmetric, "absmax" of each row, as in LLM.int8() (arXiv:2208.07339) without its
outliers. The head is quantized too. If it is tied, the embeddings are read from its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.models.backend import Backend
from nanovllm.models.layers import Linear

LARGEST = 127
# A row of smaller numbers is quantized as if this were its largest, so that nothing divides by 0.
SMALLEST = 1e-30
# Rows of a weight that are quantized at a time. Their copies in float32 stay in the CPU's caches.
ROWS = 256
# Inputs whose product is exact in float32: a sum of 1,024 times 127 * 127 is less than 2^24.
EXACT_INPUTS = 1024


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, I] -> (values [N, I] int8, scale [N] float32): each row has its own scale.

    The largest magnitude of a row becomes 127; numbers between two integers are rounded to the
    nearest, ties to even. A row with NaN or infinity has that as its scale.
    """
    x = x.float()
    largest = x.abs().amax(dim=1).clamp(min=SMALLEST)
    inverse = torch.full_like(largest, LARGEST) / largest
    return (x * inverse[:, None]).round().to(torch.int8), largest * (1 / LARGEST)


@dataclass(slots=True)
class Int8Weight:
    """A weight [O, I], in place of a tensor: it is loaded, split and looked up like one."""

    values: Tensor  # [O, I] int8
    scale: Tensor  # [O] float32
    dtype: torch.dtype  # of the model

    @classmethod
    def empty(cls, empty: Callable[..., Tensor], outputs: int, inputs: int) -> Int8Weight:
        scale = empty(outputs, dtype=torch.float32)
        return cls(empty(outputs, inputs, dtype=torch.int8), scale, empty(0).dtype)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def split(self, sizes: list[int]) -> Sequence[Int8Weight]:
        """Views of groups of rows, `sizes` outputs each."""
        parts = zip(self.values.split(sizes), self.scale.split(sizes), strict=True)
        return [Int8Weight(values, scale, self.dtype) for values, scale in parts]

    def copy_(self, source: Tensor) -> None:
        """Quantize `source` [O, I], of any floating dtype and device."""
        for start in range(0, len(source), ROWS):
            self.store(start, *quantize(source[start : start + ROWS].to(self.values.device)))

    def store(self, start: int, values: Tensor, scale: Tensor) -> None:
        """Store quantized rows: values [N, I] int8 and scale [N] float32."""
        rows = slice(start, start + len(values))
        self.values[rows], self.scale[rows] = values, scale

    def __getitem__(self, rows: Tensor) -> Tensor:
        """rows [T] -> the weights [T, I] in the model's dtype: the embeddings of tokens."""
        return (self.values[rows] * self.scale[rows, None]).to(self.dtype)

    def dequantized(self) -> Tensor:
        """[O, I] in the model's dtype, without a copy in float32 on the way."""
        out = torch.empty_like(self.values, dtype=self.dtype)
        return torch.mul(self.values, self.scale[:, None], out=out)


def weight_only(x: Tensor, module: Linear) -> Tensor:
    """x [T, I] -> [T, O]: a product in the dtype of x with weights that are rounded to it."""
    return F.linear(x, module.weight.dequantized(), module.bias)


def dynamic(x: Tensor, module: Linear) -> Tensor:
    """x [T, I] -> [T, O]: a product of int8 with int8. The result is rounded once, from float32."""
    weight = module.weight
    values, scale = quantize(x)
    y = integer_product(values, weight.values).float() * scale[:, None] * weight.scale
    return (y if module.bias is None else y + module.bias).to(x.dtype)


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I] int8, weight [O, I] int8 -> [T, O] int32, exact for less than 2^17 inputs."""
    total = x.new_zeros((len(x), len(weight)), dtype=torch.int32)
    inputs = zip(x.split(EXACT_INPUTS, dim=1), weight.split(EXACT_INPUTS, dim=1), strict=True)
    for some_x, some_weights in inputs:
        total += F.linear(some_x.float(), some_weights.float()).int()
    return total


class Int8Backend(Backend):
    """Plain torch with the weights of linear layers in int8."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ValueError if the device has no product of int8 for the dtype."""
        if device.type == "cpu" and dtype is torch.float16:
            raise ValueError(
                "quantization='int8' on a CPU is for float32 and bfloat16, and dtype is 'float16'; "
                "set dtype='bfloat16'"
            )
        super().__init__(device, dtype)

    def make_weight(self, outputs: int, inputs: int) -> Int8Weight:
        return Int8Weight.empty(self.empty, outputs, inputs)

    def linear(self, x: Tensor, module: Linear) -> Tensor:
        product = dynamic if self.device.type == "cpu" else weight_only
        return product(x, module)
