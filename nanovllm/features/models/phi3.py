"""Phi-3 and Phi-4: q, k and v are one tensor of a checkpoint, and gate and up are another one.

The rest of the transformer is models/qwen3.py. In Phi-4-mini only a part of each head is rotated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from nanovllm.models.backend import Backend
from nanovllm.models.layers import Linear
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import MLP, DecoderLayer, Qwen3, SelfAttention
from nanovllm.models.weights import CheckpointTensor


class Phi3Config(ModelConfig):
    def model_class(self) -> type[Phi3]:
        return Phi3


def fused(linear: Linear, name: str) -> Linear:
    """Give all projections of a Linear one name in a checkpoint."""
    linear.projections = {name: sum(linear.projections.values())}
    return linear


class Phi3Attention(SelfAttention):
    def __init__(self, config: ModelConfig, layer: int, backend: Backend) -> None:
        super().__init__(config, layer, backend)
        fused(self.qkv_proj, "qkv_proj")
        rows = torch.arange(self.qkv_proj.weight.shape[0], device="cpu")
        q_and_k = rows.unflatten(0, (-1, config.head_dim))[: -config.num_kv_heads]
        q_and_k.copy_(q_and_k[:, config.rope.pairs(config.head_dim)])
        self.rows = rows  # of the tensor in a checkpoint, in the order of RotaryEmbedding

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        qkv, output = super().checkpoint_tensors(prefix)
        yield replace(qkv, store=lambda weight: qkv.store(weight[self.rows]))
        yield output


class Phi3(Qwen3):
    def make_layers(self) -> list[DecoderLayer]:
        config, backend = self.config, self.backend
        attns = [Phi3Attention(config, i, backend) for i in range(config.num_layers)]
        return [DecoderLayer(config, a, self.make_mlp(a.layer), backend) for a in attns]

    def make_mlp(self, layer: int) -> MLP:
        mlp = super().make_mlp(layer)
        fused(mlp.gate_up_proj, "gate_up_proj")
        return mlp
