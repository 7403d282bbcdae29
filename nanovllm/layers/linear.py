"""Linear: y = x W^T + b. Packed projections (q, k, v; gate, up) are one Linear, read in slices."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
