"""Makes the model on its device and loads its weights."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from nanovllm.config import EngineConfig
from nanovllm.models.backend import Backend
from nanovllm.models.checkpoint import weight_files
from nanovllm.models.config import ModelConfig
from nanovllm.models.qwen3 import Qwen3
from nanovllm.models.weights import load_weights, random_weights
from nanovllm.runner.backends import pick_backend


def load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    directory: Path,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Qwen3, Backend]:
    backend = pick_backend(config.attention_backend, device, dtype, model_config.num_weights)
    # torch's defaults for dtype and device would apply to other threads too.
    backend = replace(backend, empty=partial(torch.empty, dtype=dtype, device=device))
    model = Qwen3(model_config, max_model_len, backend)
    if config.load_format == "dummy":
        random_weights(model.checkpoint_parts(), config.seed, device)
    else:
        load_weights(model.checkpoint_parts(), weight_files(directory))
    for module in model.linears():  # one after the other, to save memory
        backend.pack(module)
    return model, backend
