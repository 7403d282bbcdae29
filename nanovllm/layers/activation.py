"""SwiGLU's gate (Shazeer 2020, arXiv:2002.05202)."""

from torch import Tensor
from torch.nn import functional as F


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2F] = (gate, up) side by side -> silu(gate) * up [T, F]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
