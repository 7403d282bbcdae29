"""Products with the weights of experts in plain torch, the reference of the kernels.

Each token uses the weights of a few experts only. Its rows, one for each of its experts, are
therefore sorted by expert. The product of consecutive rows with the weights of one expert is then
an ordinary product.

    token                  0  0  1  1  2  2        sorted   0  2  1  0  1  2
    expert                 3  0  1  3  0  3   ->            0  0  1  3  3  3     ends  2 3 3 6

Shapes: T tokens, k experts per token, N = T * k rows, X experts, I inputs, O outputs of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.models.layers import Linear


@dataclass(frozen=True)
class Groups:
    """The rows of a step, sorted by expert."""

    tokens: Tensor  # [N] int64, the token of each sorted row
    places: Tensor  # [T, k] int64, the sorted row of each token and choice
    ends: Tensor  # [X] int64, the index after the last sorted row of each expert

    @classmethod
    def of(cls, choices: Tensor, num_experts: int) -> Groups:
        """Sort the rows of `choices` [T, k], the experts of each token."""
        # No result has a size that depends on the choices, so that a CUDA graph can contain this.
        experts, order = choices.flatten().sort(stable=True)
        numbers = torch.arange(num_experts, device=experts.device)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        ends = torch.searchsorted(experts, numbers, right=True)
        return cls(order // choices.shape[1], places.view_as(choices), ends)


def expert_linear(x: Tensor, module: Linear, ends: Tensor) -> Tensor:
    """Multiply the sorted rows x [N, I] by the weights of their experts. Returns [N, O].

    The weight [X O, I] of `module` has the rows of all experts in order.
    """
    outputs = module.weight.shape[0] // len(ends)
    out = x.new_empty((len(x), outputs))
    start = 0
    weights = module.weight.split([outputs] * len(ends))
    for weight, end in zip(weights, ends.tolist(), strict=True):
        if start < end:
            expert: Any = SimpleNamespace(weight=weight, bias=None)  # a Linear for products
            out[start:end] = module.backend.linear(x[start:end], expert)
        start = end
    return out


def expert_mlp(
    x: Tensor, weights: Tensor, choices: Tensor, gate_up: Linear, down: Linear
) -> Tensor:
    """Return for each token of x [T, E] the sum of the results of its experts [T, E].

    `weights` and `choices` [T, k] are the factors and the numbers of the experts.
    """
    groups = Groups.of(choices, down.weight.shape[0] // x.shape[1])

    def product(x: Tensor, module: Linear) -> Tensor:
        kernels: Any = module.backend.experts(module)
        linear = expert_linear if kernels is None else kernels.expert_linear
        result: Tensor = linear(x, module, groups.ends)
        return result

    rows = product(gate_up.backend.silu_and_mul(product(x[groups.tokens], gate_up)), down)
    # On a CPU, a bmm of gathered rows takes 2 to 13 times as long.
    return F.embedding_bag(groups.places, rows, per_sample_weights=weights, mode="sum")
