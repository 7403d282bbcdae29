"""Linear layers with weights in int8 on a CPU: `dynamic` of backends/int8.py in one kernel.

VNNI, the dot product of AVX-512 for int8, adds to each of 16 numbers in int32 the products of 4
neighbours. The weights are stored in the order in which the kernel reads them:
[O / 64, I / 4, 64, 4], where I is a multiple of 32.

    four vectors     output    0       1    ..   63
    inputs 0 to 3         [ wwww | wwww | .. | wwww ]       x of a token: inputs 0 to 3 in all lanes
           4 to 7         [ wwww | wwww | .. | wwww ]                     inputs 4 to 7

AMX multiplies 16 tokens with a block, of which it takes 64 inputs of 16 outputs at a time.

One operand of both is unsigned: w + 128 is stored. A sum would therefore be too large by 128 times
the sum of the token's activations, so it starts at minus this number. No sum overflows. SDOT, Arm's
instruction, multiplies signed numbers: its kernel changes w + 128 to w, and the sum starts at 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.backends.cpu.jit import compiled, has_amx
from nanovllm.backends.cpu.kernels import amx
from nanovllm.backends.cpu.kernels.primitives import array, bytes_of, int32
from nanovllm.backends.cpu.kernels.product import (
    PackedWeight,
    Product,
    finish,
    padded_inputs,
    quantized_bytes,
    quantized_product,
)
from nanovllm.backends.cpu.kernels.simd import add_block
from nanovllm.backends.int4 import GROUP_SIZE
from nanovllm.backends.int8 import Int8Weight

OUTPUTS = 64  # of a block of weights
HAS_AMX = has_amx("amx-int8")
TOKEN_BLOCK = 64  # tokens that stay in the L2 cache
TOKENS = amx.TILE_ROWS if HAS_AMX else TOKEN_BLOCK  # of a call of add_int8


class PackedInt8(PackedWeight):
    """A weight in int8. A word has 4 inputs of an output."""

    @classmethod
    def layout(cls, dtype: torch.dtype, inputs: int) -> tuple[Product, int, int, torch.dtype]:
        product = quantized_product(product_blocks, OUTPUTS, dtype)
        return product, padded_inputs(inputs) // 4, 1, torch.float32

    copy_: Any = Int8Weight.copy_

    def store(self, start: int, values: Tensor, scale: Tensor) -> None:
        unsigned = F.pad(values.view(torch.uint8) ^ 128, (0, -self.inputs % GROUP_SIZE))
        super().store(start, unsigned.view(torch.int32), scale[:, None])

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return rows [T] of the weight, dequantized: the embeddings [T, I] of T tokens."""
        words, scale = self.read(rows)
        values = (words.view(torch.uint8)[:, : self.inputs] ^ 128).view(torch.int8)
        return (values * scale).to(self.dtype)


@compiled()
def amx_tile(word, sums_ptr, x_ptr, stride, weight_ptr, steps, tokens):
    """Compute the same as add_block, 64 inputs at a time. The remaining ones are left to it.

    Each of four tiles B is 64 inputs of 16 outputs, as the weights are stored.
    """
    config = np.zeros(64, np.uint8)
    config[0], config[16:32:2] = 1, 64
    config[48:53], config[53:56] = tokens, amx.TILE_ROWS
    amx.tile_config(config)
    amx.tile_load(0, sums_ptr, 4 * OUTPUTS)
    amx.tile_load(1, sums_ptr + 64, 4 * OUTPUTS)
    amx.tile_load(2, sums_ptr + 128, 4 * OUTPUTS)
    amx.tile_load(3, sums_ptr + 192, 4 * OUTPUTS)
    for _ in range(steps // amx.TILE_ROWS):
        amx.tile_load(4, x_ptr, stride)
        amx.tile_load(5, weight_ptr, 4 * OUTPUTS)
        amx.tile_dot_int8(0, 4, 5)
        amx.tile_load(6, weight_ptr + 64, 4 * OUTPUTS)
        amx.tile_dot_int8(1, 4, 6)
        amx.tile_load(7, weight_ptr + 128, 4 * OUTPUTS)
        amx.tile_dot_int8(2, 4, 7)
        amx.tile_load(5, weight_ptr + 192, 4 * OUTPUTS)
        amx.tile_dot_int8(3, 4, 5)
        x_ptr, weight_ptr = x_ptr + 64, weight_ptr + 64 * OUTPUTS
    amx.tile_store(0, sums_ptr, 4 * OUTPUTS)
    amx.tile_store(1, sums_ptr + 64, 4 * OUTPUTS)
    amx.tile_store(2, sums_ptr + 128, 4 * OUTPUTS)
    amx.tile_store(3, sums_ptr + 192, 4 * OUTPUTS)
    amx.tile_release()
    if steps % amx.TILE_ROWS > 0:
        add_block(word, sums_ptr, x_ptr, stride, weight_ptr, steps % amx.TILE_ROWS, tokens)


add_int8: Any = amx_tile if HAS_AMX else add_block


@compiled()
def product_blocks(x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example,
                   start, stop):
    """Compute blocks of 64 outputs, as product.py describes."""
    size = padded_inputs(inputs)
    stride = quantized_bytes(inputs)
    sums = np.empty((TOKENS, OUTPUTS), np.int32)
    for first in range(0, rows, TOKEN_BLOCK):
        last = min(first + TOKEN_BLOCK, rows)
        for block in range(start, stop):
            o = block * OUTPUTS
            sums_ptr = np.int64(sums.ctypes.data)
            for t in range(first, last, TOKENS):
                x = x_ptr + t * stride
                tokens = min(TOKENS, last - t)
                for i in range(tokens):
                    sums[i] = array(x + i * stride + size + 4, (1,), int32(0))[0]
                add_int8(int32(0), sums_ptr, x, stride, weight_ptr + o * size, size // 4, tokens)
                finish(sums_ptr, x + size, stride, scale_ptr, bias_ptr,
                       out_ptr + t * outputs * bytes_of(example), tokens, outputs, o, OUTPUTS,
                       int32(0), example)
