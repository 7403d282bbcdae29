"""Random weights in place of a checkpoint's, for load_format="dummy"."""

from collections.abc import Iterable

import torch

from nanovllm.models.weights import CheckpointTensor


def random_weights(tensors: Iterable[CheckpointTensor], seed: int, device: torch.device) -> None:
    """Store small random weights, unit norms and zero biases."""
    generator = torch.Generator(device).manual_seed(seed % 2**63)
    for tensor in tensors:
        if tensor.name.endswith("norm.weight"):
            weight = torch.ones(tensor.shape, device=device)
        elif tensor.name.endswith(".bias"):
            weight = torch.zeros(tensor.shape, device=device)
        else:
            numbers = torch.empty(tensor.shape, dtype=torch.float32, device=device)
            weight = numbers.normal_(std=0.02, generator=generator)
        tensor.store(weight[tensor.slices])
