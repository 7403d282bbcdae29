"""Weights of linear layers in int4, quantized while they are loaded: quantization="int4".

A weight W [O, I] is approximated by values * scale. `values` are whole numbers from -8 to 7, and
each group of 32 inputs of an output has one `scale` in float16, so a weight takes 4.5 bits. As in
backends/int8.py, a GPU multiplies in the dtype of x (`int8.weight_only`), and a CPU quantizes x to
int8 (`dynamic`). The sum of a group is an exact integer. The head is in int8: in int4 it costs more
than all layers together (docs/measurements.md).

16 bytes store a group: the low halves have inputs 0 to 15 plus 8, the high halves inputs 16 to 31
plus 8. llama.cpp's Q4_0 has the same layout; `quantize` chooses better scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.backends import int8
from nanovllm.models.backend import Backend
from nanovllm.models.layers import Linear

GROUP_SIZE = 32
LM_HEAD = "lm_head"  # its weight, which can also be the embeddings, is in int8
MIN_SCALE = 2.0**-24  # the smallest positive number in float16
# Rows of a weight that are converted together. Their float32 copies stay in the CPU's caches.
ROWS = 64
# Weights that a GPU converts to the model's dtype at a time: 32 MiB in half precision. An H100's L2
# cache has 50 MiB.
PART = 2**24


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize groups of x [N, I]. Returns (values [N, G, 32] int8, scale [N, G] float16).

    The last group is padded with zeros.
    """
    groups = F.pad(x.float(), (0, -x.shape[1] % GROUP_SIZE)).unflatten(1, (-1, GROUP_SIZE))
    # The number with the largest magnitude becomes -8.
    index = groups.abs().argmax(dim=2, keepdim=True)
    scale = (groups.gather(2, index) / -8).half().float()
    scale = torch.where(scale == 0, MIN_SCALE, scale)
    values = (groups / scale).round().clamp(-8, 7)
    return values.to(torch.int8), scale.squeeze(2).half()


def pack(values: Tensor) -> Tensor:
    """Pack values [N, G, 32] int8 -> [N, G, 4] int32."""
    low, high = (values + 8).view(torch.uint8).split(GROUP_SIZE // 2, dim=2)
    return (low | high << 4).view(torch.int32)


def unpack(packed: Tensor) -> Tensor:
    """Unpack [N, G, 4] int32 -> values [N, G, 32] int8."""
    both = packed.contiguous().view(torch.uint8)
    return torch.cat((both & 15, both >> 4), dim=2).view(torch.int8) - 8


@dataclass(slots=True)
class Int4Weight:
    """A quantized weight [O, I], which is loaded, split and indexed like a tensor."""

    takes_int4: ClassVar = True  # `copy_` accepts a QuantizedWeight
    values: Tensor  # [O, G, 4] int32
    scale: Tensor  # [O, G] float16
    inputs: int  # I
    dtype: torch.dtype  # of the model

    @classmethod
    def empty(cls, empty: Callable[..., Tensor], outputs: int, inputs: int) -> Int4Weight:
        shape = outputs, -(-inputs // GROUP_SIZE)
        values = empty(*shape, 4, dtype=torch.int32)
        scale = empty(*shape, dtype=torch.float16)
        return cls(values, scale, inputs, empty(0).dtype)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.values), self.inputs))

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def tensors(self) -> list[Tensor]:
        return [self.values, self.scale]

    def split(self, sizes: list[int]) -> Sequence[Int4Weight]:
        """Return views of consecutive rows, `sizes` outputs each."""
        parts = zip(self.values.split(sizes), self.scale.split(sizes), strict=True)
        return [Int4Weight(values, scale, self.inputs, self.dtype) for values, scale in parts]

    def copy_(self, source: Any) -> None:
        """Quantize `source` [O, I], a tensor of any floating dtype and device.

        A QuantizedWeight of features/formats/quantized_weight.py keeps its numbers if they fit.
        """
        if not isinstance(source, Tensor):
            if (groups := source.int4_groups()) is not None:
                values, scale = groups
                self.store(0, pack(values), scale)
                return
            source = source.dequantized()
        for start in range(0, len(source), ROWS):
            values, scale = quantize(source[start : start + ROWS].to(self.values.device))
            self.store(start, pack(values), scale)

    def store(self, start: int, packed: Tensor, scale: Tensor) -> None:
        """Store quantized rows from row `start`: packed [N, G, 4] int32, scale [N, G] float16."""
        rows = slice(start, start + len(packed))
        self.values[rows] = packed
        self.scale[rows] = scale

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return the packed values [N, G, 4] int32 and the scale [N, G] of rows."""
        return self.values[rows], self.scale[rows]

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        """Return the weights [N, I] of rows, in `dtype`."""
        packed, scale = self.read(rows)
        weights = unpack(packed) * scale.float()[:, :, None]
        return weights.flatten(1)[:, : self.inputs].to(self.dtype)

    def dequantized(self) -> Tensor:
        """Return the weight [O, I] in the model's dtype."""
        # A GPU waits for the host if each of its launches converts only a few rows.
        size = ROWS if self.values.device.type == "cpu" else max(1, PART // self.inputs)
        return torch.cat([self[slice(i, i + size)] for i in range(0, len(self.values), size)])


def dynamic(x: Tensor, module: Linear) -> Tensor:
    """Quantize x [T, I] to int8. Returns x W^T [T, O], summed in float32."""
    weight = module.weight
    tokens, token_scale = int8.quantize(x)
    tokens = F.pad(tokens, (0, -tokens.shape[1] % GROUP_SIZE)).float()
    tokens = tokens.unflatten(1, (-1, GROUP_SIZE))
    packed, scale = weight.read(slice(None))
    values = unpack(packed).float()
    y = x.new_zeros((len(x), len(values)), dtype=torch.float32)
    for group in range(values.shape[1]):
        y += F.linear(tokens[:, group], values[:, group]) * scale[:, group].float()
    y *= token_scale[:, None]
    return (y if module.bias is None else y + module.bias).to(x.dtype)


def quantized(backend: Backend) -> Backend:
    """Return a backend for the same device with the weights of linear layers in int4."""
    if type(backend) is Backend:
        return Int4Backend(backend.device, backend.dtype)
    return backend.quantized("int4")


class Int4Backend(int8.Int8Backend):
    """The backend in plain torch with the weights of linear layers in int4."""

    def make_weight(self, outputs: int, inputs: int, names: list[str]) -> Any:
        if LM_HEAD in names:
            return super().make_weight(outputs, inputs, names)
        return Int4Weight.empty(self.empty, outputs, inputs)

    def linear(self, x: Tensor, module: Linear) -> Tensor:
        if self.rounds_inputs and isinstance(module.weight, Int4Weight):
            return dynamic(x, module)
        return super().linear(x, module)
