"""Qwen3.5 (text): layers of linear attention between layers of gated attention.

The rest of the transformer is models/qwen3.py. Three things differ from Qwen3. The norms multiply
by 1 + w, in float32. Only a part of each head is rotated. Attention has an output gate, whose
projection is part of q_proj.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.models.families import pairs
from nanovllm.features.models.hybrid.hybrid_config import KERNEL_SIZE, LINEAR, HybridConfig
from nanovllm.features.models.moe.qwen3_moe import make_mlp
from nanovllm.features.models.norms import norm_weight, plus_one
from nanovllm.models.attention import PlainAttention
from nanovllm.models.backend import Backend
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.layers import Linear, Rope
from nanovllm.models.model_config import FULL
from nanovllm.models.qwen3 import MLP, DecoderLayer, Qwen3, SelfAttention
from nanovllm.models.weights import CheckpointTensor


class LinearAttention(SelfAttention):
    """Linear attention by the gated delta rule. states.py keeps its states."""

    name = "linear_attn."

    def __init__(self, config: HybridConfig, layer: int, backend: Backend) -> None:
        """`layer` is its number among the linear layers."""
        self.layer = layer
        self.eps = config.rms_norm_eps
        self.sizes = (
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        heads = self.sizes[1]
        channels = config.conv_size
        size = config.value_size
        projections = {"qkv": channels, "z": size, "b": heads, "a": heads}
        named = {f"in_proj_{name}": outputs for name, outputs in projections.items()}
        self.in_proj = Linear(config.hidden_size, named, backend)
        self.out_proj = Linear(size, {"out_proj": config.hidden_size}, backend)
        # The weight is in float32 and transposed, as kernels read it.
        self.conv1d = backend.empty(KERNEL_SIZE, channels, dtype=torch.float32)
        self.a_log, self.dt_bias, self.norm = (
            backend.empty(n, dtype=torch.float32) for n in (heads, heads, self.sizes[3])
        )

    def __call__(
        self, x: Tensor, rope: Rope, batch: ForwardBatch, attention: PlainAttention
    ) -> Tensor:
        assert batch.states is not None
        return self.out_proj(batch.states.attend(self, self.in_proj(x)))

    def linears(self) -> tuple[Linear, Linear]:
        return self.in_proj, self.out_proj

    def other_tensors(self) -> tuple[Tensor, ...]:
        return self.conv1d, self.a_log, self.dt_bias, self.norm

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        for linear in self.linears():
            yield from linear.checkpoint_tensors(prefix)
        shape = (self.conv1d.shape[1], 1, KERNEL_SIZE)
        copy = self.conv1d.copy_
        yield CheckpointTensor(f"{prefix}conv1d.weight", shape, lambda t: copy(t[:, 0].T))
        yield CheckpointTensor.of(f"{prefix}A_log", self.a_log)
        yield CheckpointTensor.of(f"{prefix}dt_bias", self.dt_bias)
        yield CheckpointTensor.of(f"{prefix}norm.weight", self.norm)


class GatedAttention(SelfAttention):
    """Attention whose output is multiplied by the sigmoid of a gate."""

    def __init__(self, config: HybridConfig, layer: int, backend: Backend) -> None:
        """`layer` is its number among the layers with a KV cache."""
        self.layer = layer
        self.config = config
        self.backend = backend
        self.q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        sizes = {"q_proj": self.q_size, "k_proj": kv_size, "v_proj": kv_size, "gate": self.q_size}
        self.qkv_gate_proj = Linear(config.hidden_size, sizes, backend, config.attention_bias)
        self.o_proj = Linear(
            self.q_size, {"o_proj": config.hidden_size}, backend, config.output_bias
        )
        self.norms = norm_weight(backend, config.head_dim), norm_weight(backend, config.head_dim)

    def __call__(
        self, x: Tensor, rope: Rope, batch: ForwardBatch, attention: PlainAttention
    ) -> Tensor:
        projections = self.qkv_gate_proj(x)
        qkv, gate = projections.split([projections.shape[1] - self.q_size, self.q_size], dim=1)
        q = attention.norm_rope_store(self.layer, qkv.contiguous(), self.norms, rope, batch)
        attended = attention.attend(self.layer, q, batch)
        return self.o_proj(self.backend.multiply_by_sigmoid(attended, gate))

    def linears(self) -> tuple[Linear, Linear]:
        return self.qkv_gate_proj, self.o_proj

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        heads = self.config.num_heads
        proj = self.qkv_gate_proj
        for kind, fused in (("weight", proj.weight), ("bias", proj.bias)):
            if fused is None:
                continue
            q, k, v, gate = fused.split([*proj.projections.values()])

            def store_q(t: Tensor, q: Tensor = q, gate: Tensor = gate) -> None:
                # Each head has the rows of its query, then the rows of its gate.
                rows = torch.arange(t.shape[0]).unflatten(0, (heads, 2, -1)).transpose(0, 1)
                q_rows, gate_rows = rows.flatten(1)
                q.copy_(t[self.permuted(q_rows)])
                gate.copy_(t[gate_rows])

            def store_k(t: Tensor, k: Tensor = k) -> None:
                k.copy_(t[self.permuted(torch.arange(t.shape[0]))])

            for name, store, size in (
                ("q_proj", store_q, 2 * q.shape[0]),
                ("k_proj", store_k, k.shape[0]),
            ):
                tensor = CheckpointTensor.of(f"{prefix}{name}.{kind}", k)
                yield replace(tensor, shape=(size, *k.shape[1:]), store=store)
            yield CheckpointTensor.of(f"{prefix}v_proj.{kind}", v)
        yield from self.o_proj.checkpoint_tensors(prefix)
        for name, norm in zip(("q_norm", "k_norm"), self.norms or (), strict=False):
            yield plus_one(CheckpointTensor.of(f"{prefix}{name}.weight", norm), self.permuted)

    def permuted(self, weight: Tensor) -> Tensor:
        """Reorder the rows of each head of q or k [heads * D, ...]. Products do not change."""
        dim = self.config.head_dim
        return weight.unflatten(0, (-1, dim))[:, pairs(dim, self.config.rope)].flatten(0, 1)


class Qwen3_5(Qwen3):
    config: HybridConfig

    def __init__(self, config: HybridConfig, max_model_len: int, backend: Backend) -> None:
        super().__init__(config, max_model_len, backend)
        self.norm = norm_weight(backend, config.hidden_size)

    def make_layers(self) -> list[DecoderLayer]:
        config = self.config
        backend = self.backend
        # Each kind of layer is numbered by itself, because KV and states are kept apart.
        kinds: dict[str, Any] = {
            FULL: (GatedAttention, count()),
            LINEAR: (LinearAttention, count()),
        }
        layers: list[DecoderLayer] = []
        for i, kind in enumerate(config.layer_types):
            attention, numbers = kinds[kind]
            attn = attention(config, next(numbers), backend)
            layer = DecoderLayer(config, attn, self.make_mlp(i), backend)
            layer.input_layernorm = norm_weight(backend, config.hidden_size)
            layer.post_attention_layernorm = norm_weight(backend, config.hidden_size)
            layers.append(layer)
        return layers

    def make_mlp(self, layer: int) -> MLP:
        return make_mlp(self.config, layer, self.backend)

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        for tensor in super().checkpoint_tensors():
            is_norm = tensor.name.endswith(("layernorm.weight", "model.norm.weight"))
            yield plus_one(tensor) if is_norm else tensor
