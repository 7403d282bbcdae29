"""Random LoRA adapters in PEFT's format, and the weights for which they stand."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


def save_adapter(path: Path, tensors: Tensors, **config: Any) -> Path:
    """Save an adapter; the names of its tensors lack the prefix of PEFT."""
    path.mkdir(exist_ok=True)
    named = {f"base_model.model.{name}": x.contiguous() for name, x in tensors.items()}
    save_file(named, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "the/base", "r": 4} | config
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def lora(base: Tensors, modules: str, rank: int = 4, seed: int = 0) -> Tensors:
    """Factors of all weights whose name matches."""
    generator, tensors = torch.Generator().manual_seed(seed), Tensors()
    for name, weight in base.items():
        if re.search(modules, name):
            (outputs, inputs), module = weight.shape, name.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator)
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / 9
    return tensors


def with_factors(base: Tensors, tensors: Tensors, scale: float) -> Tensors:
    """The base model, with scale * B A added to each weight that has factors."""
    merged = dict(base)
    for name in tensors:
        if name.endswith("lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            product = tensors[f"{module}.lora_B.weight"].double() @ tensors[name].double()
            merged[f"{module}.weight"] = (merged[f"{module}.weight"] + scale * product).float()
    return merged
