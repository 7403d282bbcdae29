"""Qwen3 and Qwen2 (dense): the whole model, top to bottom.

Owns: the weights. Given: a ForwardBatch and the attention backend. Mutates: the KV cache, through the
backend. The two differ by what ModelConfig says: Qwen3 normalises queries and keys per head, Qwen2
has a bias on the q, k, v projections.

Plain objects, not torch modules: nothing here is trained or hooked, and on a CPU the calls of modules
took 4 ms of a decode step of 70 (Qwen3-0.6B's shape, two sequences).

Shapes: T tokens of the step, R rows that draw a token, E hidden size, H query heads, K KV heads,
D head size, F feed-forward size, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.attention.backend import AttentionBackend
from nanovllm.config import ModelConfig
from nanovllm.layers.linear import Linear, linear, packed
from nanovllm.layers.ops import Ops
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.runner.batch import ForwardBatch


class Attention:
    def __init__(self, config: ModelConfig, layer: int) -> None:
        self.layer = layer
        kv_size = config.num_kv_heads * config.head_dim
        self.sizes = [config.num_heads * config.head_dim, kv_size, kv_size]
        self.qkv = Linear(config.hidden_size, sum(self.sizes), bias=config.attention_bias)
        self.out = Linear(self.sizes[0], config.hidden_size, bias=config.output_bias)
        self.q_norm = torch.empty(config.head_dim) if config.qk_norm else None
        self.k_norm = torch.empty(config.head_dim) if config.qk_norm else None

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, attention: AttentionBackend
    ) -> Tensor:
        qkv = self.qkv(x)
        found = attention.attend(self.layer, qkv, self.q_norm, self.k_norm, cos, sin, batch)
        return self.out(found)


class MLP:
    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        self.ops = ops
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down = Linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.ops.silu_and_mul(self.gate_up(x)))


class Layer:
    def __init__(self, config: ModelConfig, layer: int, ops: Ops) -> None:
        self.ops, self.eps = ops, config.rms_norm_eps
        self.attention_norm = torch.empty(config.hidden_size)
        self.attention = Attention(config, layer)
        self.mlp_norm = torch.empty(config.hidden_size)
        self.mlp = MLP(config, ops)

    def products(self) -> tuple[Linear, ...]:
        return self.attention.qkv, self.attention.out, self.mlp.gate_up, self.mlp.down

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        attention: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        """(x, residual) -> (x, residual); their sum is the hidden state. Adding is left to the next
        norm, which reads both anyway."""
        x, residual = self.ops.add_rms_norm(x, residual, self.attention_norm, self.eps)
        x = self.attention(x, cos, sin, batch, attention)
        x, residual = self.ops.add_rms_norm(x, residual, self.mlp_norm, self.eps)
        return self.mlp(x), residual


class Qwen3:
    """Built with torch's default dtype and device; weights are uninitialised until loaded."""

    def __init__(self, config: ModelConfig, max_model_len: int, ops: Ops) -> None:
        self.config, self.ops = config, ops
        self.embedding = torch.empty(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(
            config.head_dim, max_model_len, config.rope_theta, config.rope_factor
        )
        self.layers = [Layer(config, i, ops) for i in range(config.num_layers)]
        self.norm = torch.empty(config.hidden_size)
        self.head = self.embedding
        if not config.tie_word_embeddings:
            self.head = torch.empty_like(self.embedding)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Hidden states of the step's tokens, normalised: [T, E]."""
        x = F.embedding(batch.input_ids, self.embedding)
        cos, sin = self.rotary.at(batch.positions)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin, batch, attention)
        return self.ops.add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> logits [R, V]."""
        return linear(hidden, self.head)

    def pack(self) -> None:
        """Once the weights are loaded: lay them out for the CPU's matrix units, where that helps.

        One after the other, so that only one is ever held twice; but a tied head is packed beside
        the table that embeds, which stays as it is. What `checkpoint_tensors` gave before must be
        let go of: it holds on to the plain weights.
        """
        for product in (p for layer in self.layers for p in layer.products()):
            product.weight = packed(product.weight)
        self.head = packed(self.head)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Where each tensor of a checkpoint goes: its name there -> (a slice of) a weight."""
        places: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm,
        }
        if not self.config.tie_word_embeddings:
            places["lm_head.weight"] = self.head
        for i, layer in enumerate(self.layers):
            at, attn, mlp = f"model.layers.{i}.", layer.attention, layer.mlp
            places[at + "input_layernorm.weight"] = layer.attention_norm
            places[at + "post_attention_layernorm.weight"] = layer.mlp_norm
            for name, part in zip("qkv", attn.qkv.weight.split(attn.sizes), strict=True):
                places[f"{at}self_attn.{name}_proj.weight"] = part
            if attn.qkv.bias is not None:
                for name, part in zip("qkv", attn.qkv.bias.split(attn.sizes), strict=True):
                    places[f"{at}self_attn.{name}_proj.bias"] = part
            places[at + "self_attn.o_proj.weight"] = attn.out.weight
            if attn.out.bias is not None:
                places[at + "self_attn.o_proj.bias"] = attn.out.bias
            if attn.q_norm is not None and attn.k_norm is not None:
                places[at + "self_attn.q_norm.weight"] = attn.q_norm
                places[at + "self_attn.k_norm.weight"] = attn.k_norm
            gate, up = mlp.gate_up.weight.chunk(2)
            places[at + "mlp.gate_proj.weight"], places[at + "mlp.up_proj.weight"] = gate, up
            places[at + "mlp.down_proj.weight"] = mlp.down.weight
        return places
