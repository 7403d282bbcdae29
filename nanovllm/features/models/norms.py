"""Norms that multiply by 1 + w, where w is in a checkpoint, as in Qwen3.5 and Gemma 3."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nanovllm.models.backend import Backend
from nanovllm.models.weights import CheckpointTensor


def norm_weight(backend: Backend, size: int) -> Tensor:
    """Return an uninitialized weight 1 + w. bfloat16 would round it by up to 0.4 %."""
    return backend.empty(size, dtype=torch.float32)


def plus_one(
    tensor: CheckpointTensor, reorder: Callable[[Tensor], Tensor] = lambda w: w
) -> CheckpointTensor:
    """Return the same tensor, of which 1 + w is stored."""
    return replace(tensor, store=lambda w: tensor.store(1 + reorder(w.float())))
