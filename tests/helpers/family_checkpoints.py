"""Random checkpoints of the families that differ from Qwen3 by names, factors and rotation."""

from pathlib import Path
from typing import Any

import checkpoints
import torch
from checkpoints import randomize

SIZES: dict[str, Any] = checkpoints.SIZES | dict(
    num_hidden_layers=3, bos_token_id=None, pad_token_id=None
)
del SIZES["head_dim"], SIZES["tie_word_embeddings"]  # each family has its own defaults
LONG = {  # 18 of 24 numbers of a head are rotated
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + i / 8 for i in range(9)],
    "long_factor": [2.0 + i for i in range(9)],
}
YARN = dict(
    rope_type="yarn", type="yarn", rope_theta=1e6, factor=2.0, beta_fast=32.0, beta_slow=1.0
)
YARN |= dict(mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=256)
FACTORS = dict(embedding_multiplier=0.6, logits_scaling=0.7, residual_multiplier=0.5)
MROPE = dict(rope_type="default", rope_theta=5e6, mrope_section=[4, 4, 4], mrope_interleaved=True)
SCALED = {"rope_type": "linear", "factor": 8.0}
VISION = dict(hidden_size=32, intermediate_size=32)
# The class of transformers without "ForCausalLM" or "ForConditionalGeneration", and fields.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3vl": ("Qwen3VL", dict(head_dim=24, rope_parameters=MROPE)),
    "phi4": ("Phi3", dict(original_max_position_embeddings=512)),
    "phi4mini": (
        "Phi3",
        dict(hidden_size=96, tie_word_embeddings=True, partial_rotary_factor=0.75)
        | dict(rope_parameters=LONG, original_max_position_embeddings=160),
    ),
    "smollm3": ("SmolLM3", dict(no_rope_layers=[1, 0, 1])),
    "ministral3": (
        "Mistral3",
        dict(head_dim=24, rope_parameters=YARN | {"llama_4_scaling_beta": 0.1}),
    ),
    "granite": ("Granite", dict(tie_word_embeddings=True, attention_multiplier=0.1, **FACTORS)),
    # Windows that are smaller than a block, no multiple of it, in some layers, and with other ropes.
    "mistral window": ("Mistral", dict(sliding_window=5)),
    "qwen2 window": (
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=40, max_window_layers=1),
    ),
    "gemma3": (
        "Gemma3Text",
        dict(head_dim=24, sliding_window=20, sliding_window_pattern=2, query_pre_attn_scalar=40),
    ),
    "gemma3 images": (
        "Gemma3",
        dict(head_dim=16, sliding_window=33, layer_types=["sliding_attention", "full_attention"])
        | dict(num_hidden_layers=2, rope_scaling=SCALED),
    ),
    "granite untied": ("Granite", dict(attention_multiplier=0.4, attention_bias=True, **FACTORS)),
}


def make_family_checkpoint(
    path: Path, family: str, seed: int = 0, **fields: Any
) -> torch.nn.Module:
    """Save a random checkpoint and return transformers' model of it, in float32."""
    import transformers

    torch.manual_seed(seed)
    name, changes = FAMILIES[family]
    settings = SIZES | changes | fields
    if name == "Qwen3VL":
        sizes = dict(depth=1, num_heads=2, out_hidden_size=64, num_position_embeddings=16)
        vision = VISION | sizes | {"deepstack_visual_indexes": [0]}
        config = transformers.Qwen3VLConfig(text_config=settings, vision_config=vision)
    elif name == "Mistral3":
        text = transformers.Ministral3Config(**settings)
        sizes = dict(model_type="pixtral", num_hidden_layers=1, num_attention_heads=2, head_dim=16)
        vision = VISION | sizes | dict(image_size=28, patch_size=14)
        config = transformers.Mistral3Config(text_config=text, vision_config=vision)
    elif name == "Gemma3":
        sizes = dict(num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
        vision = VISION | sizes
        config = transformers.Gemma3Config(text_config=settings, vision_config=vision)
    else:
        config = getattr(transformers, f"{name}Config")(**settings)
    ending = "ForConditionalGeneration" if hasattr(config, "vision_config") else "ForCausalLM"
    model_class = getattr(transformers, name.removesuffix("Text") + ending)
    model = model_class(config).float().eval()
    randomize(model, zero_centered=name.startswith("Gemma3"), scale=1.5)
    if name.startswith("Gemma3"):  # the factor of the embeddings would hide the layers
        model.get_input_embeddings().weight.data *= 0.25
    model.save_pretrained(path)
    return model
