"""Gemma 3 (text): most layers have a window, and layers with and without one have different ropes.

The rest of the transformer is models/qwen3.py. There are norms after attention and after the MLP,
too. All norms multiply by 1 + w in float32. The gate of the MLP is GELU. The embeddings are
multiplied by sqrt(E), and scores divided by sqrt(query_pre_attn_scalar).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanovllm.features.models.norms import norm_weight, plus_one
from nanovllm.features.models.text_config import TextConfig
from nanovllm.models.backend import Backend
from nanovllm.models.model_config import ANY, FULL, SIZE, SLIDING
from nanovllm.models.qwen3 import DecoderLayer, Qwen3
from nanovllm.models.weights import CheckpointTensor
from nanovllm.utils.json_files import Fields, check_fields

# The fields of config.json that Gemma3Config reads.
FIELDS: Fields = {
    "hidden_activation": (str, ("gelu_pytorch_tanh",)),
    "layer_types": (list, ANY),
    "query_pre_attn_scalar": (float, (1e-6, 1e6)),
    "rope_local_base_freq": (float, (1, math.inf)),
    "rope_parameters": (dict, ANY),
    "sliding_window_pattern": (int, SIZE),
}
UNUSED = ("cache_implementation", "mm_tokens_per_image")


@dataclass(frozen=True)
class Gemma3Config(TextConfig):
    """A ModelConfig of Gemma 3."""

    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path) -> Gemma3Config:
        """Create a Gemma3Config. Raises ValueError for missing or unsupported fields."""
        own = check_fields({n: raw[n] for n in FIELDS if n in raw}, path, FIELDS)
        fields = {name: x for name, x in raw.items() if name not in (*FIELDS, *UNUSED)}
        # Newer files have the ropes of both kinds of layers in rope_parameters.
        ropes = own.get("rope_parameters", {})
        if others := ropes.keys() - {FULL, SLIDING}:
            raise ValueError(
                f"{path}: rope_parameters must have {FULL!r} and {SLIDING!r}, and has "
                f"{min(others)!r}; rope_scaling is for full layers"
            )
        full = super().from_json(fields | {"rope_parameters": ropes.get(FULL)}, path)
        assert isinstance(full, Gemma3Config)
        pattern = own.get("sliding_window_pattern", 6)  # of so many layers, the last one is full
        types = own.get(
            "layer_types", [SLIDING if (i + 1) % pattern else FULL for i in range(full.num_layers)]
        )
        fields |= {"layer_types": types, "use_sliding_window": True, "rope_scaling": None}
        local = ropes.get(SLIDING) or {"rope_theta": own.get("rope_local_base_freq", 1e4)}
        sliding = super().from_json(fields | {"rope_parameters": local}, path)
        return replace(
            full,
            windows=sliding.windows,
            ropes=tuple(sliding.rope if kind == SLIDING else full.rope for kind in types),
            attention_scale=(full.head_dim / own.get("query_pre_attn_scalar", 256.0)) ** 0.5,
        )

    def model_class(self) -> type[Gemma3]:
        return Gemma3


class Gemma3(Qwen3):
    def __init__(self, config: Gemma3Config, max_model_len: int, backend: Backend) -> None:
        super().__init__(config, max_model_len, backend)
        self.norm = norm_weight(backend, config.hidden_size)
        # As transformers, in the dtype of the model.
        factor = torch.tensor(config.hidden_size**0.5, dtype=backend.dtype, device="cpu")
        self.embedding_factor = float(factor)

    def make_layers(self) -> list[DecoderLayer]:
        new = partial(norm_weight, self.backend)
        size, dim = self.config.hidden_size, self.config.head_dim
        layers = super().make_layers()
        for layer in layers:
            layer.input_layernorm, layer.post_attention_layernorm = new(size), new(size)
            layer.output_norms = new(size), new(size)
            layer.self_attn.norms = new(dim), new(dim)
            layer.mlp.activation = "gelu_and_mul"
        return layers

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        for tensor in super().checkpoint_tensors():
            name = tensor.name.replace("post_attention", "pre_feedforward")
            yield plus_one(replace(tensor, name=name)) if "norm" in name else tensor
        for i, layer in enumerate(self.layers):
            for part, norm in zip(("attention", "feedforward"), layer.output_norms, strict=True):
                name = f"model.layers.{i}.post_{part}_layernorm.weight"
                yield plus_one(CheckpointTensor.of(name, norm))
