"""A solution of `python -m lessons build delta`."""

import torch
from torch import Tensor


def step(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    kept = states * g.exp()[:, None, None]
    d = beta[:, None] * (v - torch.einsum("hkv,hk->hv", kept, k))
    new = kept + k[:, :, None] * d[:, None]
    return new, torch.einsum("hkv,hk->hv", new, q)
