"""Linear layers on a CPU: weights in float32 and bfloat16, and the products of all weights.

A kernel reads a weight [O, I] in blocks of outputs, in the order in which it needs them. With plain
weights, a product of one token would read at many places of memory at once.
"""

from __future__ import annotations

import torch
from numba import get_num_threads
from torch import Tensor
from torch.nn import functional as F

from nanovllm.backends.cpu.kernels.primitives import DTYPE_EXAMPLE
from nanovllm.backends.cpu.kernels.product import (
    PackedWeight,
    Product,
    compute,
    padded_bytes,
    pointers,
)
from nanovllm.backends.cpu.kernels.simd import float_product
from nanovllm.models.layers import Linear

# Rows of a weight that are converted together. Their copies stay in the CPU's caches.
ROWS = 256


class PackedFloats(PackedWeight):
    """A weight in the model's dtype. A word has two inputs in bfloat16, and one in float32."""

    @classmethod
    def layout(cls, dtype: torch.dtype, inputs: int) -> tuple[Product, int, int, torch.dtype]:
        words = padded_bytes(inputs, dtype.itemsize) // 4
        return float_product(dtype, inputs), words, 0, torch.int32

    def copy_(self, source: Tensor) -> None:
        """Store `source` [O, I], of any floating dtype."""
        padding = self.values.shape[1] * 4 // self.dtype.itemsize - self.inputs
        for start in range(0, len(source), ROWS):
            rows = source[start : start + ROWS].to(self.values.device, self.dtype)
            words = F.pad(rows, (0, padding)).contiguous().view(torch.int32)
            self.store(start, words, words[:, :0])

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return rows [T] of the weight [T, I]."""
        return self.read(rows)[0].view(self.dtype)[:, : self.inputs]


def linear(x: Tensor, module: Linear) -> Tensor:
    """Return x [T, I] times a packed weight [O, I]: [T, O]."""
    product = module.weight.product
    outputs = module.weight.shape[0]
    x = x.contiguous()
    rows, inputs = x.shape
    out = x.new_empty((rows, outputs))
    work = x.new_empty(rows * product.work_bytes(inputs), dtype=torch.uint8)
    sizes = rows, inputs, outputs, work.data_ptr()
    like = DTYPE_EXAMPLE[x.dtype]
    compute(
        product, x.data_ptr(), *pointers(module), out.data_ptr(), *sizes, like, get_num_threads()
    )
    return out
