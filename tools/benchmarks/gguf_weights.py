"""Writes the random weights of a shape as a GGUF file, for llama.cpp."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm.features.formats.gguf.convert_gguf import FIELDS

MORE_FIELDS = {
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "head_dim": "attention.value_length",
    "vocab_size": "vocab_size",
}
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}  # of a model_type
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.")


def gguf_path(directory: Path) -> Path:
    """Return the path for `write_gguf`. Raises ValueError if it cannot write this model."""
    if find_spec("gguf") is None:
        raise ValueError("--baseline llama.cpp writes a GGUF file of a shape; pip install gguf")
    kind = read_config(directory)["model_type"]
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"--baseline llama.cpp runs shapes of {known}; this is one of {kind}")
    return directory / "model.gguf"


def read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def write_gguf(directory: Path, kind: str) -> Path:
    """Convert model.safetensors to a GGUF file, and return its path.

    kind: the type of the matrices, a name of gguf.GGMLQuantizationType such as "F32" or "Q8_0".
        Norms and routers are always in float32. The file has no tokenizer.
    """
    import gguf
    from safetensors import safe_open

    path = gguf_path(directory)
    config = read_config(directory)
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=False)
    config |= config.get("rope_parameters") or {}
    for ours, theirs in [*FIELDS.items(), *MORE_FIELDS.items()]:
        if (value := config.get(ours)) is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{theirs}", value)
    writer.add_tokenizer_model("none")
    num_experts = 0
    with safe_open(directory / "model.safetensors", "pt") as file:
        parts: dict[str, list[str]] = {}  # the name in GGUF -> the names of its tensors
        kind_of = gguf.MODEL_ARCH[architecture.upper()]
        names = gguf.get_tensor_name_map(kind_of, config["num_hidden_layers"])
        for name in sorted(file.keys(), key=expert_of):
            whole = EXPERT.sub("mlp.experts.", name)  # experts of a layer are one tensor
            parts.setdefault(str(names.get_name(whole, (".weight", ".bias"))), []).append(name)
        for name, sources in parts.items():
            values = np.stack([file.get_tensor(source).float().numpy() for source in sources])
            if "_exps." in name:
                num_experts = len(values)
            else:
                values = values[0]
            exact = values.ndim == 1 or "ffn_gate_inp" in name
            raw = gguf.GGMLQuantizationType["F32" if exact else kind]
            writer.add_tensor(name, gguf.quants.quantize(values, raw), raw_dtype=raw)
    if num_experts:
        writer.add_uint32(f"{architecture}.expert_count", num_experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def expert_of(name: str) -> int:
    match = EXPERT.search(name)
    return int(match[1]) if match else 0
