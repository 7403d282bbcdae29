"""Random checkpoints of Qwen3-MoE and Qwen3.5-MoE, small and decisive."""

from pathlib import Path
from typing import Any

import torch
from hybrid_checkpoints import hybrid_settings, randomize


def make_moe_checkpoint(
    path: Path, seed: int = 0, hybrid: bool = False, **config: Any
) -> torch.nn.Module:
    """Save a random checkpoint and return transformers' model of it, in float32.

    hybrid: Qwen3.5-MoE instead of Qwen3-MoE.
    """
    from transformers import (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(seed)
    experts = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48)
    if hybrid:
        settings = (
            hybrid_settings(config.pop("layer_types", "LLLF"))
            | experts
            | {"shared_expert_intermediate_size": 40}
        )
        settings |= {"architectures": ["Qwen3_5MoeForCausalLM"]} | config
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**settings))
    else:
        settings = experts | dict(
            architectures=["Qwen3MoeForCausalLM"],
            vocab_size=199,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            eos_token_id=0,
        )
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | config)))
    model = model.float().eval()
    randomize(model, zero_centered=hybrid)
    model.save_pretrained(path)
    return model
