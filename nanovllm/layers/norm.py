"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), alone and with the residual add before it."""

import torch
from torch import Tensor


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(RMSNorm(x + residual) * weight, x + residual); without a residual x itself. x [T, E]."""
    total = x if residual is None else residual + x
    return rms_norm(total, weight, eps), total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size] / rms(x) * weight [size]. The mean square is taken in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
