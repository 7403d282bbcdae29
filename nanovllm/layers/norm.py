"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), alone and with the residual add before it."""

import torch
from torch import Tensor

from nanovllm.layers.parts import parts


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(RMSNorm(x + residual) * weight, x + residual); without a residual x itself. x [T, E]."""
    total = x if residual is None else residual + x
    out = torch.empty_like(total)
    for rows, normed in parts(total, out):
        normalize(rows, eps, normed).mul_(weight)
    return out, total


def normalize(x: Tensor, eps: float, out: Tensor) -> Tensor:
    """out = x [..., size] / rms(x). The mean square is taken in float32."""
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(wide, scale, out=out)
