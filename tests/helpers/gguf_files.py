"""Writes checkpoints as GGUF files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

import nanovllm
from nanovllm.features.formats.gguf.convert_gguf import FIELDS, GEMMA3

gguf = pytest.importorskip("gguf")
NANO = Path(nanovllm.__file__).parent / "loading" / "qwen3-nano"
END = "<|end|>"


def reordered(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k as llama.cpp's converter orders them."""
    size = weight.shape[0] // heads
    order = np.arange(len(weight)).reshape(heads, 2, size // 2).swapaxes(1, 2).reshape(-1)
    return weight[order]


def write_gguf(
    path: Path,
    kind: str,
    checkpoint: Path,
    quantized: bool = False,
    tokenizer: str = "gpt2",
    divisors: np.ndarray | None = None,
    **more: Any,
) -> Path:
    """Write a checkpoint, with a small tokenizer."""
    from safetensors.torch import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    config |= config.get("rope_parameters") or {}
    writer = gguf.GGUFWriter(path, kind)
    for ours, theirs in (FIELDS | (GEMMA3 if kind == "gemma3" else {})).items():
        if (value := config.get(ours)) is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add = writer.add_array if isinstance(value, list) else add
            add(f"{kind}.{theirs}", value)
    for name, value in more.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        key = name if name.startswith(("general.", "split.", "tokenizer.")) else f"{kind}.{name}"
        add.get(type(value), writer.add_float32)(key, value)
    # Bytes, two merges and a special token. The rest are placeholders, as in padded vocabularies.
    tokens = [*bytes_to_unicode().values(), "th", "the", END]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == END else 1 for token in tokens])
    writer.add_token_merges(["t h", "th e"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_eos_token(True)
    writer.add_chat_template((NANO / "chat_template.jinja").read_text())
    weights = {}
    for file in checkpoint.glob("*.safetensors"):
        weights |= load_file(file)
    arch = gguf.MODEL_ARCH[kind.upper()] if kind != "gemma" else gguf.MODEL_ARCH.QWEN3
    names = gguf.get_tensor_name_map(arch, 100)
    for name, tensor in weights.items():
        values = tensor.float().numpy()
        if kind == "gemma3" and "norm" in name:  # it is stored as 1 + w
            values = values + 1
        theirs = names.get_name(name, (".weight", ".bias"))
        module = theirs.split(".")[-2]
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(module)
        if kind == "llama" and heads:
            values = reordered(values, config[heads])
        if quantized and values.ndim == 2 and values.shape[1] % 32 == 0:
            data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(theirs, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(theirs, values)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
