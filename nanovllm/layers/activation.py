"""SwiGLU's gate (Shazeer 2020, arXiv:2002.05202)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.layers.parts import parts


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2F] = (gate, up) side by side -> silu(gate) * up [T, F]."""
    out = x.new_empty(len(x), x.shape[1] // 2)
    for rows, gated in parts(x, out):
        gate, up = rows.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=gated)
    return out
