"""SwiGLU's gate (Shazeer 2020, arXiv:2002.05202)."""

from torch import Tensor
from torch.nn import functional as F

from nanovllm.layers.parts import in_parts


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2F] = (gate, up) side by side -> silu(gate) * up [T, F]."""
    return in_parts(_silu_and_mul, x)


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
