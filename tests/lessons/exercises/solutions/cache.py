"""A solution of `python -m lessons build cache`."""

import torch
from torch import Tensor


class KVCache:
    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        self.k = self.v = torch.empty(0, num_kv_heads, head_dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = len(self.k)
        self.k, self.v = torch.cat((self.k, k)), torch.cat((self.v, v))
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (self.k, self.v))
        scores = torch.einsum("nhd,lhd->hnl", q, keys) / q.shape[2] ** 0.5
        seen = torch.arange(len(keys)) <= before + torch.arange(len(q))[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hnl,lhd->nhd", weights, values)
