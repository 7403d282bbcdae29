"""QuantizedWeight: one weight [O, I] as small numbers, in the same layout for all formats.

    W[o, i] = (values[o, i] - zeros[b, g]) * scales[b, g]     b = o // rows, g = groups[i]

A block of weights, which are `rows` outputs and the inputs with the same g, shares a scale and
maybe a zero point. The functions at the end unpack numbers of 4 or 8 bits from words of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ONES = {4: 0x11111111, 8: 0x01010101}  # words whose numbers of 4 or 8 bits are all 1
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position of output 0, 1, 2, ... of each eight


@dataclass(frozen=True)
class QuantizedWeight:
    """The tensors of one weight [O, I], in the same layout for all formats."""

    values: Tensor  # [O, I], integers or numbers of 8 bits
    scales: Tensor  # [O / rows, G]
    zeros: Tensor | int  # as `scales`
    rows: int  # consecutive outputs that share a scale
    groups: Tensor  # [I] int64, the column of `scales` for each input

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantized(self) -> Tensor:
        """Return the weight [O, I] in the dtype of the scales, rounded once."""
        zeros = self.zeros if isinstance(self.zeros, int) else self._expand(self.zeros)
        weight = (self.values.float() - zeros) * self._expand(self.scales)
        return weight.to(self.scales.dtype).contiguous()  # AWQ stores the transpose

    def __getitem__(self, index: Tensor | tuple[slice | Tensor, ...]) -> QuantizedWeight:
        """Return rows, and columns if there are two slices, of a weight with rows = 1."""
        rows, columns = (*index, slice(None))[:2] if isinstance(index, tuple) else (index, ...)
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[rows]
        values = self.values[rows, columns]
        groups = self.groups[columns]
        return QuantizedWeight(values, self.scales[rows], zeros, self.rows, groups)

    def int4_groups(self) -> tuple[Tensor, Tensor] | None:
        """Return values [O, I / 32, 32] int8 from -8 to 7 and scales [O, I / 32] float16.

        Returns None if the weight has 8 bits, zero points, groups that are no multiples of 32
        consecutive inputs, or scales that float16 does not represent. Then it has to be quantized
        again.
        """
        scales = self.scales.half()
        is_symmetric = bool((torch.as_tensor(self.zeros) == 8).all() and self.values.max() < 16)
        if len(self.groups) % 32 or not is_symmetric or not torch.equal(scales, self.scales):
            return None
        groups = self.groups.unflatten(0, (-1, 32))
        if (groups != groups[:, :1]).any():
            return None
        values = (self.values.to(torch.int8) - 8).unflatten(1, (-1, 32))
        return values, scales[:, groups[:, 0]]

    def _expand(self, per_block: Tensor) -> Tensor:
        """Repeat a number per block [O / rows, G] for each weight. Returns [O, I] float32."""
        rows = per_block.float().repeat_interleave(self.rows, dim=0)[: len(self.values)]
        return rows[:, self.groups]


def bits_per_number(name: str, words: int, numbers: int) -> int:
    """Return the bits of each of `numbers` in a row of `words` of 32 bits."""
    for bits in ONES:
        if words == -(-numbers * bits // 32):
            return bits
    raise ValueError(
        f"{name} packs {numbers} numbers into {words} words of 32 bits; supported are 4 and 8 bits "
        "for a number"
    )


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 [N, M] -> uint8 [N, M * 32 / bits]. The lowest bits are the first number."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    return (packed[:, :, None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1)


def from_awq_order(x: Tensor) -> Tensor:
    """Sort the columns of unpacked numbers [N, M], which AWQ interleaves in each eight."""
    return x.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1)
