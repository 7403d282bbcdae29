"""Shapes: real architectures on random weights, nothing downloaded.

Owns: the table SHAPES. Given: a directory to write to. A shape's weights are those of
load_format="dummy" (the engine's seed 0), so that every engine reads the same from one file.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nanovllm.config import ModelConfig
from nanovllm.layers.ops import PLAIN
from nanovllm.models.qwen3 import Qwen3
from nanovllm.runner.memory import available_host_memory
from nanovllm.runner.weights import random_weights

# hidden, feed-forward, layers, query heads, KV heads, head size, vocabulary, tied, positions
SHAPES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151_936, True, 40_960),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151_936, True, 40_960),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151_936, True, 40_960),
    "qwen3-8b": (4096, 12_288, 36, 32, 8, 128, 151_936, False, 40_960),
    "qwen3-14b": (5120, 17_408, 40, 40, 8, 128, 151_936, False, 40_960),
    "qwen2.5-7b": (3584, 18_944, 28, 28, 4, 128, 152_064, False, 32_768),
    # of issue 5's CPU goals, which leave the feed-forward open: three times hidden, as the 0.6B has
    "cpu-small": (256, 768, 4, 4, 2, 64, 4096, True, 4096),
}


def hf_config(shape: str) -> dict[str, Any]:
    """What config.json of the shape says."""
    hidden, feed_forward, layers, heads, kv_heads, head_dim, vocab, tied, positions = SHAPES[shape]
    family = "Qwen2" if shape.startswith("qwen2") else "Qwen3"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        # of Qwen2 the head size follows from the others, and config.json does not name it
        **({} if family == "Qwen2" else {"head_dim": head_dim, "attention_bias": False}),
    }


def write_shape(shape: str, parent: Path) -> Path:
    """A directory with config.json alone: enough for load_format="dummy"."""
    directory = parent / shape
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf_config(shape), indent=1))
    return directory


def write_weights(directory: Path, dtype: torch.dtype) -> None:
    """Beside config.json, the random weights that it would be run on; for the engines beside ours."""
    config = ModelConfig.from_file(directory / "config.json")
    with torch.device("meta"):
        places = Qwen3(config, 16, PLAIN).checkpoint_tensors()
    weights = {name: torch.empty(p.shape, dtype=dtype) for name, p in places.items()}
    random_weights(weights, seed=0)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def num_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Qwen3(config, 16, PLAIN).checkpoint_tensors().values())


def check_fits(
    name: str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    copies: int,
    disk: Path | None,
) -> None:
    """Raise ValueError if the weights, so many times over, leave no room where they have to be."""
    one = num_parameters(config) * dtype.itemsize
    if device.type == "cuda":
        free, where = torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
    else:
        free, where = available_host_memory(), "this machine"
    places = [(copies * one, free, where)]
    if disk is not None:
        places.append((one, shutil.disk_usage(disk).free, f"{disk} (TMPDIR puts it elsewhere)"))
    for need, there, what in places:
        if need > 0.9 * there:  # the cache and activations need the rest
            smaller = ", ".join(s for s, (h, *_) in SHAPES.items() if h < config.hidden_size)
            times = f", {copies} times over for the baselines," if copies > 1 else ""
            raise ValueError(
                f"{name} takes {need / 2**30:.1f} GiB in {str(dtype).removeprefix('torch.')}{times} and "
                f"{what} has {there / 2**30:.1f} GiB free; use a smaller one (--shape {smaller or 'cpu-small'})"
                f"{', or fewer baselines' if times else ''}"
            )
