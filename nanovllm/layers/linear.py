"""Linear: y = x W^T + b. Packed projections (q, k, v; gate, up) are one Linear, read in slices.

A CPU's matrix units read weights in tiles of their own. torch's plain linear lays a weight out in
them at every call; `packed` does it once. The numbers are the same, bit for bit. Measured on 2 cores
with AMX, Qwen3-0.6B's shape, GB/s of weights read (plain, packed), layers and head:

    1 to 16 tokens   15, 21 and 17, 25
    64 tokens        10, 15 and 12, 18
    1,024 and more   equal, within 4 %: the products take longer than the weights

With AVX512-BF16 and no AMX, packed weights take 0.75 to 0.85 of the time for 1 to 16 tokens, and the
same for many. float32 stays plain: its kernels need no tiles.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

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
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], None)
    return F.linear(x, weight, bias)


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
