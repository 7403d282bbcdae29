"""Random checkpoints of Qwen3.5, small and decisive."""

from pathlib import Path
from typing import Any

import torch
from checkpoints import SIZES, randomize


def make_hybrid_checkpoint(
    path: Path,
    layer_types: str = "LLLF",
    value_heads: int = 4,
    key_heads: int = 2,
    seed: int = 0,
    nested: bool = False,
    save: bool = True,
    **config: Any,
) -> torch.nn.Module:
    """Save a random checkpoint and return transformers' text model of it, in float32.

    layer_types: L for a linear layer and F for a full one. nested: as a model with images, whose
    config has a text_config and whose names have the prefix "model.language_model.".
    """
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(seed)
    settings = hybrid_settings(layer_types, value_heads, key_heads)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(settings | config))).float().eval()
    randomize(model, zero_centered=True)
    if save:
        model.save_pretrained(path)
    if nested:
        nest(path)
    return model


def hybrid_settings(
    layer_types: str = "LLLF", value_heads: int = 4, key_heads: int = 2
) -> dict[str, Any]:
    names = {"L": "linear_attention", "F": "full_attention"}
    return SIZES | dict(
        architectures=["Qwen3_5ForCausalLM"],
        num_hidden_layers=len(layer_types),
        layer_types=[names[letter] for letter in layer_types],
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    )


def nest(path: Path) -> None:
    """Change a saved checkpoint to the layout of Qwen3_5ForConditionalGeneration."""
    import json

    from safetensors.torch import load_file, save_file

    text = json.loads((path / "config.json").read_text())
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text | {"model_type": "qwen3_5_text"},
        "vision_config": {"depth": 1, "model_type": "qwen3_5_vision"},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": 7,
    }
    (path / "config.json").write_text(json.dumps(config))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(3)
    tensors["mtp.fc.weight"] = torch.zeros(3, 3)
    save_file(tensors, path / "model.safetensors")
