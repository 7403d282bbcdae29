"""Qwen3 and Qwen2 (dense): the whole transformer, top to bottom.

The model owns its weights and changes only the KV cache, through attention. The two families differ
in what ModelConfig says: Qwen3 normalizes queries and keys per head, Qwen2 has a bias on the q, k
and v projections. A Qwen3 config may ask for biases, then on the output projection too.

The classes are plain objects and not torch modules: nothing is trained or hooked here, and on a CPU
the calls of modules took 4 of the 70 ms of a decode step (Qwen3-0.6B's shape, two sequences).

Shapes: T tokens of the step, R rows that sample a token, E hidden size, H query heads, K KV heads,
D head size, F feed-forward size, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.batch import ForwardBatch
from nanovllm.models.backend import Attention, Backend
from nanovllm.models.config import ModelConfig
from nanovllm.models.layers import Norms, Rope, RotaryEmbedding, rms_norm, rotate


class Linear:
    """y = x W^T + b. Projections of the same input (q, k, v; gate, up) are one Linear."""

    def __init__(self, inputs: int, outputs: int, backend: Backend, bias: bool = False) -> None:
        self.weight = backend.empty(outputs, inputs)
        self.bias = backend.empty(outputs) if bias else None
        self.linear = backend.linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight, self.bias)


class SelfAttention:
    def __init__(self, config: ModelConfig, layer: int, backend: Backend) -> None:
        self.layer, self.backend, self.eps = layer, backend, config.rms_norm_eps
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.sizes = [heads * config.head_dim for heads in self.heads]
        hidden, bias = config.hidden_size, config.attention_bias
        self.qkv_proj = Linear(hidden, sum(self.sizes), backend, bias)
        self.o_proj = Linear(self.sizes[0], hidden, backend, config.output_bias)
        self.norms: Norms = None  # norm weights of q and k
        if config.qk_norm:
            self.norms = backend.empty(config.head_dim), backend.empty(config.head_dim)

    def __call__(self, x: Tensor, rope: Rope, batch: ForwardBatch, attention: Attention) -> Tensor:
        qkv = self.qkv_proj(x)  # [T, (H + 2K) D]
        if self.backend.fused_attention:
            q = attention.norm_rope_store(self.layer, qkv, self.norms, rope, batch)
        else:
            q, k, v = qkv.unflatten(-1, (sum(self.heads), -1)).split(self.heads, dim=1)
            if self.norms is not None:
                q_norm, k_norm = self.norms
                q, k = rms_norm(q, q_norm, self.eps), rms_norm(k, k_norm, self.eps)
            q, k = rotate(q, rope), rotate(k, rope)
            # All tokens are stored before any attends, because sequences can share blocks.
            attention.store(self.layer, k, v, batch)
        return self.o_proj(attention.attend(self.layer, q, batch))


class MLP:
    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        self.backend = backend
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, backend)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, backend)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(self.backend.silu_and_mul(self.gate_up_proj(x)))


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer: int, backend: Backend) -> None:
        self.backend, self.eps = backend, config.rms_norm_eps
        self.input_layernorm = backend.empty(config.hidden_size)
        self.self_attn = SelfAttention(config, layer, backend)
        self.post_attention_layernorm = backend.empty(config.hidden_size)
        self.mlp = MLP(config, backend)

    def linears(self) -> tuple[Linear, ...]:
        attn, mlp = self.self_attn, self.mlp
        return attn.qkv_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rope: Rope,
        batch: ForwardBatch,
        attention: Attention,
    ) -> tuple[Tensor, Tensor]:
        """(x, residual) -> (x, residual), whose sum is the hidden state [T, E].

        The addition is left to the next norm, which reads both anyway.
        """
        x, residual = self.backend.add_rms_norm(x, residual, self.input_layernorm, self.eps)
        x = self.self_attn(x, rope, batch, attention)
        x, residual = self.backend.add_rms_norm(
            x, residual, self.post_attention_layernorm, self.eps
        )
        return self.mlp(x), residual


class Qwen3:
    """`backend.empty` makes the weights, which are uninitialized until they are loaded."""

    def __init__(self, config: ModelConfig, max_model_len: int, backend: Backend) -> None:
        self.config, self.backend = config, backend
        self.embed_tokens = backend.empty(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(
            config.head_dim, max_model_len, config.rope_theta, config.rope_factor, self.embed_tokens
        )
        self.layers = [DecoderLayer(config, i, backend) for i in range(config.num_layers)]
        self.norm = backend.empty(config.hidden_size)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = torch.empty_like(self.embed_tokens)

    def forward(self, batch: ForwardBatch, attention: Attention) -> Tensor:
        """The hidden states of the step's tokens, after the last norm: [T, E]."""
        x = F.embedding(batch.input_ids, self.embed_tokens)
        rope, residual = self.rotary.at(batch.positions), None
        for layer in self.layers:
            x, residual = layer(x, residual, rope, batch, attention)
        return self.backend.add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> logits [R, V]."""
        return self.backend.linear(hidden, self.lm_head, None)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Map the name of each checkpoint tensor to a weight of the model or a slice of one."""
        tensors: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed_tokens,
            "model.norm.weight": self.norm,
        }
        if not self.config.tie_word_embeddings:
            tensors["lm_head.weight"] = self.lm_head
        for i, layer in enumerate(self.layers):
            prefix, attn, mlp = f"model.layers.{i}.", layer.self_attn, layer.mlp
            tensors[prefix + "input_layernorm.weight"] = layer.input_layernorm
            tensors[prefix + "post_attention_layernorm.weight"] = layer.post_attention_layernorm
            for name, part in zip("qkv", attn.qkv_proj.weight.split(attn.sizes), strict=True):
                tensors[f"{prefix}self_attn.{name}_proj.weight"] = part
            if attn.qkv_proj.bias is not None:
                for name, part in zip("qkv", attn.qkv_proj.bias.split(attn.sizes), strict=True):
                    tensors[f"{prefix}self_attn.{name}_proj.bias"] = part
            tensors[prefix + "self_attn.o_proj.weight"] = attn.o_proj.weight
            if attn.o_proj.bias is not None:
                tensors[prefix + "self_attn.o_proj.bias"] = attn.o_proj.bias
            if attn.norms is not None:
                for name, weight in zip("qk", attn.norms, strict=True):
                    tensors[f"{prefix}self_attn.{name}_norm.weight"] = weight
            gate, up = mlp.gate_up_proj.weight.chunk(2)
            tensors[prefix + "mlp.gate_proj.weight"] = gate
            tensors[prefix + "mlp.up_proj.weight"] = up
            tensors[prefix + "mlp.down_proj.weight"] = mlp.down_proj.weight
        return tensors
