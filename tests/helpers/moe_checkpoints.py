"""Random checkpoints of Qwen3-MoE and Qwen3.5-MoE, small and decisive."""

from pathlib import Path
from typing import Any

import torch
from checkpoints import SIZES, randomize
from hybrid_checkpoints import hybrid_settings


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
        settings = SIZES | experts | dict(num_hidden_layers=3, norm_topk_prob=True)
        settings |= {"architectures": ["Qwen3MoeForCausalLM"]} | config
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings))
    model = model.float().eval()
    randomize(model, zero_centered=hybrid)
    model.save_pretrained(path)
    return model
