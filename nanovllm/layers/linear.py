"""Linear: y = x W^T + b. Packed projections (q, k, v; gate, up) are one Linear, read in slices.

A CPU's matrix units read weights in tiles of their own. torch's plain linear lays a weight out in
them at every call; `packed` does it once. For as many tokens the numbers are the same, bit for bit; more
of them (`rounded`) may be summed in another order. Measured on 2 cores with AMX, Qwen3-0.6B's shape,
GB/s of weights read (plain, packed), layers and head:

    1 to 16 tokens   15, 21 and 17, 25
    64 tokens        10, 15 and 12, 18
    1,024 and more   equal, within 4 %: the products take longer than the weights

With AVX512-BF16 and no AMX, packed weights take 0.75 to 0.85 of the time for 1 to 16 tokens, and the
same for many. float32 stays plain: its kernels need no tiles. In a decode step kernels/cpu.py reads the
tiles itself, if they lie as it knows them.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

FEW = 16  # tokens: products of no more take any number
TOKENS = 64  # that the tiles are chosen for; for one they would be slower at 17 and more


class Linear:
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        self.weight = torch.empty(outputs, inputs)
        self.bias = torch.empty(outputs) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I], weight [O, I] plain or packed -> [T, O]."""
    if weight.is_mkldnn:
        tokens = len(x)
        if rounded(tokens) > tokens:
            x = F.pad(x, (0, 0, 0, rounded(tokens) - tokens))
        product = torch.ops.mkldnn._linear_pointwise.default
        return product(x, weight, bias, "none", [], None)[:tokens]
    return F.linear(x, weight, bias)


def rounded(tokens: int) -> int:
    """How many tokens a packed product is to have, to be one of few: at most a 16th more, or 15.

    For each number oneDNN makes code that it keeps: some 20 ms and a megabyte for each weight's shape,
    where the product of 1,000 tokens takes 3 ms.
    """
    step = max(FEW, 1 << tokens.bit_length() >> 5)
    return -(-tokens // step) * step if tokens > FEW else tokens


def packed(weight: Tensor) -> Tensor:
    """A copy of a weight [O, I] in tiles, which only `linear` can read; or itself, if none helps.

    The operations are those that torch's own compiler uses when it freezes a model.
    """
    ops = torch.ops.mkldnn
    if weight.dtype is not torch.bfloat16 or weight.device.type != "cpu":
        return weight
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return weight
    if not ops._is_mkldnn_bf16_supported():  # the processor has no AVX-512
        return weight
    return ops._reorder_linear_weight(weight, TOKENS)


def lies_in_tiles(weight: Tensor) -> bool:
    """Whether a packed weight [O, I] lies as [O / 32, I / 2, 32, 2], in pairs of two tiles of AMX.

    How torch packs is not documented: the products with some unit vectors tell, which are columns.
    """
    ops, (outputs, inputs) = torch.ops.mkldnn, weight.shape
    if not weight.is_mkldnn or not hasattr(ops, "data_ptr") or outputs % 32 or inputs % 32:
        return False
    if ops._nbytes(weight) != 2 * outputs * inputs:
        return False
    at = ctypes.cast(address(weight), ctypes.POINTER(ctypes.c_int16))
    tiles = torch.from_numpy(np.ctypeslib.as_array(at, (outputs // 32, inputs // 2, 32, 2)))
    some = torch.linspace(0, inputs - 1, TOKENS).long()
    units = torch.zeros(TOKENS, inputs, dtype=weight.dtype)
    units[torch.arange(TOKENS), some] = 1
    columns = tiles[:, some // 2, :, some % 2].flatten(1).view(weight.dtype)
    # The least numbers of all, 1e-38 and less, the matrix units take for 0.
    return bool(((linear(units, weight) - columns).abs() < 1e-37).all())


def address(weight: Tensor) -> int:
    """Of a packed weight's first number."""
    return int(torch.ops.mkldnn.data_ptr(weight))
