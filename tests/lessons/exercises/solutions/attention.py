"""A solution of `python -m lessons build attention`."""

import torch
from torch import Tensor


def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    future = torch.ones(len(q), len(q)).triu(1).bool()
    heads = []
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h // group].T / q.shape[2] ** 0.5
        heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, h // group])
    return torch.stack(heads, dim=1)
