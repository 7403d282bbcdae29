"""What the layers of a hybrid model add to fused_layers.py: states, and attention with a gate.

Also chooses which models are computed in this way (`fuse_layers`).
"""

from typing import Any

from torch import Tensor

from nanovllm.backends.cpu.attention import NumbaAttention
from nanovllm.backends.cpu.kernels import delta_rule
from nanovllm.backends.cpu.kernels.fused_layers import FusedLayers
from nanovllm.backends.cpu.kernels.layer_tables import LINEAR_ATTENTION, States
from nanovllm.backends.cpu.kernels.parallel import address_for
from nanovllm.backends.cpu.kernels.pointwise import gate_rows
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.qwen3 import MLP, DecoderLayer, Qwen3, SelfAttention


class HybridLayers(FusedLayers):
    """Computes the layers of Qwen3.5 from the addresses of its weights and states."""

    config: Any

    @property
    def row_heads(self) -> int:
        """The gate follows the queries, keys and values."""
        return 2 * (self.config.num_heads + self.config.num_kv_heads)

    def buffer_sizes(self) -> tuple[int, int]:
        projected, mixed = super().buffer_sizes()
        size = self.config.value_size
        heads = self.config.linear_num_value_heads
        linear = self.config.conv_size + size + 2 * heads
        return max(projected, linear), max(mixed, size)

    def describe_attention(self, attn: Any, attention: NumbaAttention, record: Any) -> None:
        if not hasattr(attn, "conv1d"):
            super().describe_attention(attn, attention, record)
            return
        for name in LINEAR_ATTENTION:
            record[name] = getattr(attn, name).data_ptr()
        record["state"] = attn.layer

    def forward(self, batch: ForwardBatch, attention: NumbaAttention) -> Tensor:
        """Compute Qwen3_5.forward. Steps with chunks are left to it."""
        if batch.states is None or batch.states.rounds:
            return self.model.forward(batch, attention)
        return super().forward(batch, attention)

    def states(self, batch: ForwardBatch) -> States:
        assert batch.states is not None
        assert batch.states.rows is not None
        config = self.config
        dtype = self.model.backend.dtype
        conv, rule = batch.states.states.conv, batch.states.states.rule
        return States(
            conv=conv.data_ptr(),
            rule=rule.data_ptr(),
            segments=delta_rule.of_rows(batch.states.rows.numpy()),
            conv_bytes=conv[0].nbytes,
            rule_bytes=rule[0].nbytes,
            num_states=conv.shape[1],
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            itemsize=conv.itemsize,
            advance_heads=address_for(delta_rule.advance_heads, dtype, dtype),
            gate=address_for(gate_rows, dtype, dtype),
        )


def fuse_layers(model: Qwen3, attention: NumbaAttention) -> FusedLayers | None:
    """Return the layers of the model in one call, or None if it has other layers."""
    kinds = {(type(layer).__call__, type(layer.mlp).__call__) for layer in model.layers}
    if type(model).forward is not Qwen3.forward or kinds != {(DecoderLayer.__call__, MLP.__call__)}:
        return None
    attns: list[Any] = [layer.self_attn for layer in model.layers]
    if all(type(attn).__call__ is SelfAttention.__call__ for attn in attns):
        return FusedLayers(model, attention)
    if all(hasattr(attn, "conv1d") or hasattr(attn, "qkv_gate_proj") for attn in attns):
        return HybridLayers(model, attention)
    return None
