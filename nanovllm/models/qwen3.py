"""Qwen3, Qwen2, Llama and Mistral (dense): the whole transformer, top to bottom.

The model owns its weights. It changes only the KV cache, through attention. ModelConfig describes
how the families differ: Qwen3 normalizes queries and keys per head, and Qwen2 has biases on the q,
k and v projections. The config of a Qwen3 or Llama model can enable biases on these and on the
output projection.

The classes are plain objects, not torch modules: nothing is trained here, and on a CPU the calls of
modules took 4 of the 70 ms of a decode step (Qwen3-0.6B's shape, two sequences).

Shapes: T tokens of the step, R rows that sample a token, E hidden size, H query heads, K KV heads,
D head size, F feed-forward size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nanovllm.models.attention import PlainAttention
from nanovllm.models.backend import Backend
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.layers import Linear, Norms, Rope
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.rope import RotaryEmbedding
from nanovllm.models.weights import CheckpointTensor


class SelfAttention:
    name = "self_attn."  # in a checkpoint

    def __init__(self, config: ModelConfig, layer: int, backend: Backend) -> None:
        self.layer = layer
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(config.hidden_size, qkv, backend, config.attention_bias)
        self.o_proj = Linear(q_size, {"o_proj": config.hidden_size}, backend, config.output_bias)
        self.norms: Norms = None  # norm weights of q and k
        if config.qk_norm:
            self.norms = backend.empty(config.head_dim), backend.empty(config.head_dim)

    def __call__(
        self, x: Tensor, rope: Rope, batch: ForwardBatch, attention: PlainAttention
    ) -> Tensor:
        qkv = self.qkv_proj(x)  # [T, (H + 2K) D]
        # All tokens are stored before any query attends, because sequences can share blocks.
        q = attention.norm_rope_store(self.layer, qkv, self.norms, rope, batch)
        return self.o_proj(attention.attend(self.layer, q, batch))

    def linears(self) -> tuple[Linear, ...]:
        return self.qkv_proj, self.o_proj

    def other_tensors(self) -> tuple[Tensor, ...]:
        """Return the weights that are not in a Linear."""
        return self.norms or ()

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        yield from self.qkv_proj.checkpoint_tensors(prefix)
        yield from self.o_proj.checkpoint_tensors(prefix)
        for name, norm in zip(("q_norm", "k_norm"), self.norms or (), strict=False):
            yield CheckpointTensor.of(f"{prefix}{name}.weight", norm)


class MLP:
    activation = "silu_and_mul"  # a method of the backend

    def __init__(self, hidden_size: int, size: int, backend: Backend) -> None:
        self.backend = backend
        self.gate_up_proj = Linear(hidden_size, {"gate_proj": size, "up_proj": size}, backend)
        self.down_proj = Linear(size, {"down_proj": hidden_size}, backend)

    def __call__(self, x: Tensor) -> Tensor:
        activate: Callable[[Tensor], Tensor] = getattr(self.backend, self.activation)
        return self.down_proj(activate(self.gate_up_proj(x)))

    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up_proj, self.down_proj

    def other_tensors(self) -> tuple[Tensor, ...]:
        """Return the weights that are not in a Linear."""
        return ()

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        yield from self.gate_up_proj.checkpoint_tensors(prefix)
        yield from self.down_proj.checkpoint_tensors(prefix)


class DecoderLayer:
    # The weights of norms after attention and after the MLP, which few models have.
    output_norms: tuple[Tensor, Tensor] | tuple[()] = ()

    def __init__(
        self, config: ModelConfig, attn: SelfAttention, mlp: MLP, backend: Backend
    ) -> None:
        self.backend = backend
        self.eps = config.rms_norm_eps
        self.input_layernorm = backend.empty(config.hidden_size)
        self.self_attn = attn
        self.post_attention_layernorm = backend.empty(config.hidden_size)
        self.mlp = mlp

    def linears(self) -> tuple[Linear, ...]:
        return *self.self_attn.linears(), *self.mlp.linears()

    def other_tensors(self) -> tuple[Tensor, ...]:
        """Return the weights that are not in a Linear."""
        norms = self.input_layernorm, self.post_attention_layernorm
        others = *self.self_attn.other_tensors(), *self.mlp.other_tensors()
        return *norms, *self.output_norms, *others

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        yield from self.self_attn.checkpoint_tensors(prefix + self.self_attn.name)
        yield from self.mlp.checkpoint_tensors(prefix + "mlp.")
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield CheckpointTensor.of(f"{prefix}{name}.weight", getattr(self, name))

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rope: Rope,
        batch: ForwardBatch,
        attention: PlainAttention,
    ) -> tuple[Tensor, Tensor]:
        """Map (x, residual) to (x, residual), whose sum is the hidden state [T, E].

        The next norm adds them, because it reads both anyway.
        """
        x, residual = self.backend.add_rms_norm(x, residual, self.input_layernorm, self.eps)
        x = self.self_attn(x, rope, batch, attention)
        for norm in self.output_norms[:1]:
            x, _ = self.backend.add_rms_norm(x, None, norm, self.eps)
        x, residual = self.backend.add_rms_norm(
            x, residual, self.post_attention_layernorm, self.eps
        )
        x = self.mlp(x)
        for norm in self.output_norms[1:]:
            x, _ = self.backend.add_rms_norm(x, None, norm, self.eps)
        return x, residual


class Qwen3:
    """A model of one of these families. Its weights are uninitialized until they are loaded."""

    attention_class = SelfAttention
    embedding_factor = 1.0  # multiplies the embeddings

    def __init__(self, config: ModelConfig, max_model_len: int, backend: Backend) -> None:
        self.config, self.backend = config, backend
        sizes = config.vocab_size, config.hidden_size
        self.lm_head = Linear(config.hidden_size, {"lm_head": config.vocab_size}, backend)
        is_tied = config.tie_word_embeddings
        self.embed_tokens = self.lm_head.weight if is_tied else backend.empty(*sizes)  # [V, E]
        self.layers = self.make_layers()
        self.norm = backend.empty(config.hidden_size)
        ropes = config.ropes or (config.rope,) * config.num_layers
        kinds = list(dict.fromkeys(ropes))
        self.rope_of_layer = [kinds.index(rope) for rope in ropes]
        sizes = config.head_dim, max_model_len
        self.rotary = RotaryEmbedding(*sizes, kinds, self.norm, config.attention_scale)

    def make_layers(self) -> list[DecoderLayer]:
        config, backend = self.config, self.backend
        attns = [self.attention_class(config, i, backend) for i in range(config.num_layers)]
        return [DecoderLayer(config, a, self.make_mlp(a.layer), backend) for a in attns]

    def make_mlp(self, layer: int) -> MLP:
        return MLP(self.config.hidden_size, self.config.intermediate_size, self.backend)

    @classmethod
    def on_meta(cls, config: ModelConfig, like: Backend | None = None) -> Qwen3:
        """Return a model on the meta device: its weights have sizes and take no memory.

        It has the kinds of weights of the backend `like`, by default of plain torch in bfloat16.
        """
        kind, dtype = (Backend, torch.bfloat16) if like is None else (type(like), like.dtype)
        return cls(config, 1, kind(torch.device("meta"), dtype))

    def forward(self, batch: ForwardBatch, attention: PlainAttention) -> Tensor:
        """Return the hidden states [T, E] of the step's tokens, after the last norm."""
        x = self.embed(batch.input_ids)
        ropes = self.rotary.at(batch.positions)
        residual: Tensor | None = None
        for layer, rope in zip(self.layers, self.rope_of_layer, strict=True):
            self.backend.before_layer()
            x, residual = layer(x, residual, ropes[rope], batch, attention)
        return self.backend.add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)[0]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [T, E] of token ids [T]."""
        x: Tensor = self.embed_tokens[token_ids]
        return x if self.embedding_factor == 1 else x * self.embedding_factor

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [R, E] to logits [R, V]."""
        return self.lm_head(hidden)

    def linears(self) -> Iterator[Linear]:
        """Yield every Linear, the head last. A tied head shares its weight with the embeddings."""
        for layer in self.layers:
            yield from layer.linears()
        yield self.lm_head

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that hold the weights."""
        for linear in self.linears():
            yield from linear.tensors()
        for layer in self.layers:
            yield from layer.other_tensors()
        yield self.norm
        if not self.config.tie_word_embeddings:
            yield self.embed_tokens

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """Yield the tensors of a checkpoint, each with the function that stores it."""
        yield CheckpointTensor.of("model.embed_tokens.weight", self.embed_tokens)
        for i, layer in enumerate(self.layers):
            yield from layer.checkpoint_tensors(f"model.layers.{i}.")
        yield CheckpointTensor.of("model.norm.weight", self.norm)
        if not self.config.tie_word_embeddings:
            yield from self.lm_head.checkpoint_tensors("")
