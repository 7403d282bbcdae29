"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from functools import partial

import torch
from torch import Tensor, nn

from nanovllm.layers.parts import in_parts


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [T, size] / rms(x) * weight."""
        return in_parts(partial(normalized, eps=self.eps), x).mul_(self.weight)


def normalized(x: Tensor, eps: float) -> Tensor:
    """x [..., size] / rms(x). The mean square is taken in float32."""
    wide = x.to(torch.float32, copy=True)
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return wide.mul_(scale).to(x.dtype)
