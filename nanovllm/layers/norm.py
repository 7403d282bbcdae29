"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), alone and with the residual add before it."""

from functools import partial

import torch
from torch import Tensor

from nanovllm.layers.parts import in_parts


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(RMSNorm(x + residual) * weight, x + residual); without a residual x itself. x [T, E]."""
    total = x if residual is None else residual + x
    return in_parts(partial(normalized, eps=eps), total).mul_(weight), total


def normalized(x: Tensor, eps: float) -> Tensor:
    """x [..., size] / rms(x). The mean square is taken in float32."""
    wide = x.to(torch.float32, copy=True)
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return wide.mul_(scale).to(x.dtype)
