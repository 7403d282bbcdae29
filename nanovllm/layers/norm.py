"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] / rms(x) * weight. The mean square is taken in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
