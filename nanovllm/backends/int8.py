"""Weights of linear layers in int8, quantized while they are loaded: quantization="int8".

A weight W [O, I] is approximated by values * scale, with `values` in int8 and one float32 `scale`
per output. The two products are the references for the kernels in gpu/ and cpu/:

    weight_only   y = x W^T in the dtype of x, on a GPU. With few rows, the time is the time to read
                  W, which int8 halves. Only the weights are rounded.
    dynamic       y = (q values^T) * token scale * scale, where x is about q * token scale, on a
                  CPU. Its int8 instructions multiply twice as many numbers as its bfloat16
                  instructions. The integer product is exact and each token has a separate scale,
                  so the result for a token does not depend on the rest of the batch.

Both roundings are symmetric ("absmax" of each row), as in LLM.int8() (arXiv:2208.07339) without
outliers. The head is quantized too. If the head is tied, embeddings are read from its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.models.backend import Backend
from nanovllm.models.layers import Linear

INT8_MAX = 127
# Lower bound for the absmax of a row, so that a row of zeros can be divided by it.
MIN_ABSMAX = 1e-30
# Rows of a weight that are quantized together. Their float32 copies stay in the CPU's caches.
ROWS = 256
# Inputs of a product that is exact in float32, because 1,024 * 127 * 127 is less than 2^24.
EXACT_INPUTS = 1024


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of x [N, I]. Returns (values [N, I] int8, scale [N] float32).

    The largest magnitude of a row becomes 127. Numbers are rounded to the nearest integer, ties to
    even. The scale of a row with NaN or infinity is NaN or infinity.
    """
    x = x.float()
    absmax = x.abs().amax(dim=1).clamp(min=MIN_ABSMAX)
    inverse = torch.full_like(absmax, INT8_MAX) / absmax
    return (x * inverse[:, None]).round().to(torch.int8), absmax * (1 / INT8_MAX)


@dataclass(slots=True)
class Int8Weight:
    """A quantized weight [O, I], which is loaded, split and indexed like a tensor."""

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

    def tensors(self) -> list[Tensor]:
        return [self.values, self.scale]

    def split(self, sizes: list[int]) -> Sequence[Int8Weight]:
        """Return views of consecutive rows, `sizes` outputs each."""
        parts = zip(self.values.split(sizes), self.scale.split(sizes), strict=True)
        return [Int8Weight(values, scale, self.dtype) for values, scale in parts]

    def copy_(self, source: Tensor) -> None:
        """Quantize `source` [O, I], of any floating dtype and device."""
        for start in range(0, len(source), ROWS):
            self.store(start, *quantize(source[start : start + ROWS].to(self.values.device)))

    def store(self, start: int, values: Tensor, scale: Tensor) -> None:
        """Store quantized rows from row `start`: values [N, I] int8 and scale [N] float32."""
        rows = slice(start, start + len(values))
        self.values[rows] = values
        self.scale[rows] = scale

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return rows [T] of the weight, dequantized: the embeddings [T, I] of T tokens."""
        return (self.values[rows] * self.scale[rows, None]).to(self.dtype)

    def dequantized(self) -> Tensor:
        """Return the weight [O, I] in the model's dtype, without a float32 copy."""
        out = torch.empty_like(self.values, dtype=self.dtype)
        return torch.mul(self.values, self.scale[:, None], out=out)


def weight_only(x: Tensor, module: Linear) -> Tensor:
    """Return x W^T [T, O] of x [T, I], with W in int8 or int4 dequantized to the dtype of x."""
    return F.linear(x, module.weight.dequantized(), module.bias)


def dynamic(x: Tensor, module: Linear) -> Tensor:
    """Quantize x [T, I] to int8. Returns x W^T [T, O], rounded once from float32."""
    weight = module.weight
    values, scale = quantize(x)
    y = integer_product(values, weight.values).float() * scale[:, None] * weight.scale
    return (y if module.bias is None else y + module.bias).to(x.dtype)


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [T, I] by weight [O, I], both int8 -> [T, O] int32. Exact below 2^17 inputs."""
    total = x.new_zeros((len(x), len(weight)), dtype=torch.int32)
    inputs = zip(x.split(EXACT_INPUTS, dim=1), weight.split(EXACT_INPUTS, dim=1), strict=True)
    for x_part, weight_part in inputs:
        total += F.linear(x_part.float(), weight_part.float()).int()
    return total


def quantized(backend: Backend) -> Backend:
    """Return a backend for the same device with the weights of linear layers in int8."""
    if type(backend) is Backend:
        return Int8Backend(backend.device, backend.dtype)
    return backend.quantized("int8")


class Int8Backend(Backend):
    """The backend in plain torch with the weights of linear layers in int8."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ValueError if the device has no int8 product for the dtype."""
        if device.type == "cpu" and dtype is torch.float16:
            raise ValueError(
                "quantized weights on a CPU are for float32 and bfloat16, and dtype is 'float16'; "
                "set dtype='bfloat16'"
            )
        super().__init__(device, dtype)
        self.rounds_inputs = device.type == "cpu"  # as its kernels do

    def make_weight(self, outputs: int, inputs: int, names: list[str]) -> Any:
        return Int8Weight.empty(self.empty, outputs, inputs)

    def linear(self, x: Tensor, module: Linear) -> Tensor:
        return (dynamic if self.rounds_inputs else weight_only)(x, module)
