"""Granite 3: a Llama with four factors, which are part of the weights here.

    attention_multiplier   is the scale of the products of queries and keys. Rotary embedding
                           multiplies both of them.
    residual_multiplier r  multiplies what a layer adds to the hidden state. The norms cancel a
                           common factor of the hidden state, except for eps. So the embeddings are
                           divided by r instead, and eps by r * r.
    embedding_multiplier   multiplies the embeddings.
    logits_scaling         divides the logits: the weight of the last norm is divided by it.

A tied head has the factor of the embeddings, m. An untied one is multiplied by it too, and the last
norm is divided by m. The hidden states are therefore smaller by m * logits_scaling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3
from nanovllm.models.weights import EMBEDDINGS, LM_HEAD, CheckpointTensor


@dataclass(frozen=True)
class GraniteConfig(ModelConfig):
    embedding_factor: float = 1.0  # m
    hidden_factor: float = 1.0  # of transformers' hidden states: m * logits_scaling

    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path) -> GraniteConfig:
        """Create a GraniteConfig. Raises ValueError for missing or unsupported fields."""
        base = super().from_json(raw, path)
        assert isinstance(base, GraniteConfig)
        names = "embedding_multiplier", "residual_multiplier", "attention_multiplier"
        embedding, residual, attention, logits = (
            float(raw.get(name) or 1.0) for name in (*names, "logits_scaling")
        )
        return replace(
            base,
            rms_norm_eps=base.rms_norm_eps / residual**2,
            attention_scale=attention * base.head_dim**0.5,
            embedding_factor=embedding / residual,
            hidden_factor=embedding / residual * logits,
        )

    def model_class(self) -> type[Granite]:
        return Granite


class Granite(Qwen3):
    config: GraniteConfig

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        config = self.config
        factors = dict.fromkeys((EMBEDDINGS[0], LM_HEAD), config.embedding_factor)
        factors["model.norm.weight"] = 1 / config.hidden_factor
        for tensor in super().checkpoint_tensors():
            yield multiplied(tensor, factors[tensor.name]) if tensor.name in factors else tensor


def multiplied(tensor: CheckpointTensor, factor: float) -> CheckpointTensor:
    """Return the same tensor, of which the product with `factor` is stored."""

    def store(weight: Tensor) -> None:
        tensor.store(weight.float() * factor)

    return replace(tensor, store=store)
