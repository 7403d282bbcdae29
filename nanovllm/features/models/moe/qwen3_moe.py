"""Qwen3-MoE: each token uses a few of a layer's MLPs, which are called experts.

The rest of the transformer is models/qwen3.py. A router, a small linear layer, computes how well
each expert fits a token. The token uses the k experts that fit best, and the result is the weighted
sum of their results (Shazeer et al. 2017, arXiv:1701.06538). A token reads k of X experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.models.moe import experts as reference
from nanovllm.features.models.moe.moe_config import Experts, MoeConfig
from nanovllm.models.backend import Backend
from nanovllm.models.layers import Linear
from nanovllm.models.qwen3 import MLP, Qwen3
from nanovllm.models.weights import CheckpointTensor


class SparseMLP(MLP):
    """A mixture of experts. Its two Linears have the rows of all experts.

    If there is a shared expert, all tokens use it too, multiplied by a gate.
    """

    def __init__(self, hidden_size: int, config: Experts, backend: Backend) -> None:
        self.backend = backend
        self.config = config
        self.router = backend.empty(config.num_experts, hidden_size)
        names = [f"experts.{i}." for i in range(config.num_experts)]
        inner = {f"{name}{kind}_proj": config.size for name in names for kind in ("gate", "up")}
        outer = {f"{name}down_proj": hidden_size for name in names}
        self.gate_up_proj = Linear(hidden_size, inner, backend)
        self.down_proj = Linear(config.size, outer, backend)
        self.shared: MLP | None = None
        if config.shared_size:
            self.shared = MLP(hidden_size, config.shared_size, backend)
            self.shared_gate = backend.empty(1, hidden_size)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, E] to [T, E]."""
        weights, choices = self.route(x)
        linears = self.gate_up_proj, self.down_proj
        mlp: Any = self.backend.expert_mlp(*linears) or reference.expert_mlp
        y: Tensor = mlp(x, weights, choices, *linears)
        if self.shared is not None:
            gate = self.backend.small_linear(x, self.shared_gate)
            y += self.backend.multiply_by_sigmoid(self.shared(x), gate)
        return y if self.down_proj.reduce is None else self.down_proj.reduce(y)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [T, k] in the dtype of x, and the experts [T, k] int64."""
        scores = self.backend.small_linear(x, self.router)
        probs = scores.softmax(dim=-1, dtype=torch.float32)
        weights, choices = probs.topk(self.config.num_per_token, dim=-1)
        if self.config.normalized:
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), choices

    def linears(self) -> tuple[Linear, ...]:
        shared = () if self.shared is None else self.shared.linears()
        return self.gate_up_proj, self.down_proj, *shared

    def other_tensors(self) -> tuple[Tensor, ...]:
        return (self.router,) if self.shared is None else (self.router, self.shared_gate)

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor.of(f"{prefix}gate.weight", self.router)
        yield from super().checkpoint_tensors(prefix)
        if self.shared is not None:
            yield from self.shared.checkpoint_tensors(f"{prefix}shared_expert.")
            yield CheckpointTensor.of(f"{prefix}shared_expert_gate.weight", self.shared_gate)


def make_mlp(config: Any, layer: int, backend: Backend) -> MLP:
    """Return the mixture of experts of a layer, or its only MLP."""
    experts = config.experts
    if experts is not None and layer in experts.layers:
        return SparseMLP(config.hidden_size, experts, backend)
    return MLP(config.hidden_size, config.intermediate_size, backend)


class Qwen3Moe(Qwen3):
    config: MoeConfig

    def make_mlp(self, layer: int) -> MLP:
        return make_mlp(self.config, layer, self.backend)
