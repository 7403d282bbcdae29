"""Families that differ from Llama by names of tensors, by rotation, and by factors.

Phi-3, Phi-4   q, k and v are one tensor of a checkpoint, and gate and up are another one. In
               Phi-4-mini only a part of each head is rotated, with the rope type longrope.
SmolLM3        Some layers are not rotated.
Granite 3      There are four factors; see GraniteConfig.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.features.models import gemma3
from nanovllm.features.models.hybrid.hybrid_config import HybridConfig
from nanovllm.features.models.moe.moe_config import MoeConfig
from nanovllm.features.models.text_config import TextConfig
from nanovllm.models.backend import Backend
from nanovllm.models.layers import Linear
from nanovllm.models.model_config import (
    FAMILIES,
    FIELDS,
    FULL,
    SLIDING,
    ModelConfig,
    unknown_fields,
)
from nanovllm.models.qwen3 import MLP, Qwen3, SelfAttention
from nanovllm.models.rope import RopeConfig
from nanovllm.models.weights import CheckpointTensor
from nanovllm.utils.json_files import check_field, check_fields, named


def pairs(dim: int, rope: RopeConfig) -> list[int]:
    """Return the order of a head's numbers in which RotaryEmbedding rotates i and i + D / 2.

    A checkpoint's pairs are (i, i + R / 2), if R numbers are rotated. The other numbers form pairs
    whose angle is 0.
    """
    rotated = int(dim * rope.partial_rotary_factor)
    half, middle = rotated // 2, (dim + rotated) // 2
    return [*range(half), *range(rotated, middle), *range(half, rotated), *range(middle, dim)]


# ---- Phi-3 and Phi-4 ----


class Phi3Config(ModelConfig):
    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path) -> ModelConfig:
        """Create a Phi3Config. Raises ValueError for missing or unsupported fields."""
        base = super().from_json({"rms_norm_eps": 1e-5} | raw, path)
        rope = base.rope
        size = int(base.head_dim * rope.partial_rotary_factor)
        if size % 2:
            raise ValueError(f"{path}: the {size} rotated numbers of a head do not form pairs")
        if rope.rope_type != "longrope":
            return base
        fields: dict[str, Any] = {}
        for name in ("short_factor", "long_factor"):
            values = check_field(path, name, getattr(rope, name), list, ())
            if len(values) != size // 2:
                raise ValueError(f"{path}: {name} must have {size // 2} numbers, not {len(values)}")
            fields[name] = tuple(check_field(path, name, value, float, ()) for value in values)
        if rope.factor == 1:  # the default
            fields["factor"] = base.max_position_embeddings / rope.original_max_position_embeddings
        return replace(base, rope=replace(rope, **fields))

    def model_class(self) -> type[Phi3]:
        return Phi3


def fuse(linear: Linear, name: str) -> None:
    """Give all projections of a Linear one name in a checkpoint."""
    linear.projections = {name: sum(linear.projections.values())}


class Phi3Attention(SelfAttention):
    def __init__(self, config: ModelConfig, layer: int, backend: Backend) -> None:
        super().__init__(config, layer, backend)
        fuse(self.qkv_proj, "qkv_proj")
        # The rows of a checkpoint's tensor in the order of RotaryEmbedding.
        self.rows = torch.arange(self.qkv_proj.weight.shape[0], device="cpu")
        heads = self.rows.unflatten(0, (-1, config.head_dim))[: -config.num_kv_heads]
        heads.copy_(heads[:, pairs(config.head_dim, config.rope)])

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        qkv, output = super().checkpoint_tensors(prefix)
        yield replace(qkv, store=lambda weight: qkv.store(weight[self.rows]))
        yield output


class Phi3(Qwen3):
    attention_class = Phi3Attention

    def make_mlp(self, layer: int) -> MLP:
        mlp = super().make_mlp(layer)
        fuse(mlp.gate_up_proj, "gate_up_proj")
        return mlp


# ---- SmolLM3 ----

NO_ROPE = "no_rope_layers", "no_rope_layer_interval"


class SmolLM3Config(ModelConfig):
    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path) -> ModelConfig:
        """Create a SmolLM3Config. Raises ValueError for missing or unsupported fields."""
        base = super().from_json(raw | dict.fromkeys(NO_ROPE), path)
        number = base.num_layers
        interval = check_field(path, NO_ROPE[1], raw.get(NO_ROPE[1]) or 4, int, (1, 10_000))
        # In spite of the name, 1 is for layers with rotation.
        usual = [int((i + 1) % interval > 0) for i in range(number)]
        layers = check_field(path, NO_ROPE[0], raw.get(NO_ROPE[0]) or usual, list, ())
        if len(layers) != number or any(x not in (0, 1) for x in layers):
            raise ValueError(
                f"{path}: {NO_ROPE[0]} must have {number} entries 0 or 1, not {layers}"
            )
        if raw.get("layer_types") is None:  # if there is a window, then where nothing is rotated
            fields = raw | {"layer_types": [FULL if x else SLIDING for x in layers]}
            base = super().from_json(fields | dict.fromkeys(NO_ROPE), path)
        ropes = RopeConfig(partial_rotary_factor=0.0), base.rope
        return replace(base, ropes=tuple(ropes[int(x)] for x in layers))


# ---- Granite 3 ----

FACTORS = "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"


@dataclass(frozen=True)
class GraniteConfig(ModelConfig):
    """A Llama with four factors.

    attention_multiplier is the scale of attention. residual_multiplier, r, multiplies what a layer
    adds to the hidden state. A norm cancels a factor of the hidden state, except for eps, so that
    the embeddings are divided by r instead, and eps by r * r. embedding_multiplier multiplies the
    embeddings. logits_scaling divides the logits, and here the weight of the last norm.
    """

    embedding_factor: float = 1.0  # embedding_multiplier / r
    hidden_factor: float = 1.0  # logits_scaling, by which the hidden states are too small

    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path) -> GraniteConfig:
        """Create a GraniteConfig. Raises ValueError for missing or unsupported fields."""
        base = super().from_json(raw | dict.fromkeys(FACTORS), path)
        assert isinstance(base, GraniteConfig)
        given = {name: 1.0 if raw.get(name) is None else raw[name] for name in FACTORS}
        limits = (1e-6, 1e6)
        values = (check_field(path, name, x, float, limits) for name, x in given.items())
        embedding, residual, attention, logits = values
        return replace(
            base,
            rms_norm_eps=base.rms_norm_eps / residual**2,
            attention_scale=attention * base.head_dim**0.5,
            embedding_factor=embedding / residual,
            hidden_factor=logits,
        )

    def model_class(self) -> type[Granite]:
        return Granite


class Granite(Qwen3):
    def __init__(self, config: GraniteConfig, max_model_len: int, backend: Backend) -> None:
        super().__init__(config, max_model_len, backend)
        self.embedding_factor, self.hidden_factor = config.embedding_factor, config.hidden_factor

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        for tensor in super().checkpoint_tensors():
            if tensor.name == "model.norm.weight":
                yield replace(
                    tensor, store=lambda w: self.norm.copy_(w.float() / self.hidden_factor)
                )
            else:
                yield tensor


CONFIGS: dict[str, type[ModelConfig]] = {
    "Qwen3VL": TextConfig,
    "Mistral3": TextConfig,
    "Ministral3": TextConfig,
    "Phi3": Phi3Config,
    "SmolLM3": SmolLM3Config,
    "Granite": GraniteConfig,
    "Gemma3": gemma3.Gemma3Config,
    "Qwen3Moe": MoeConfig,
    "Qwen3_5": HybridConfig,
    "Qwen3_5Moe": HybridConfig,
}


def why_refused(raw: dict[str, Any], path: Path) -> str:
    """Return that no architecture of config.json is supported, and how the nearest differs."""
    raw = check_fields(raw, path, FIELDS)
    names = raw["architectures"] or [f"none (model_type is {raw.get('model_type')!r})"]
    known = [f"{name}ForCausalLM" for name in FAMILIES]
    text = f"the architecture {', '.join(map(str, names))} is not supported; {', '.join(known)} are"
    name = str(names[0]).replace("ConditionalGeneration", "CausalLM")
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        read = *FACTORS, *NO_ROPE, *gemma3.FIELDS, *gemma3.UNUSED
        others = {x: y for x, y in unknown_fields(raw).items() if x not in read}
        fields = named(dict([*others.items()][:8])) or "another computation"
        text += f". The nearest is {near[0]}, and this model differs by {fields}"
    return text
