"""Shards: the part of a model that one rank holds; see features/parallel/ranks.py.

`config_of_rank` returns the sizes of the model of a rank, and `tensors_of_rank` its slices of the
tensors in the checkpoint. Nothing else of the checkpoint is read.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.features.models.moe.moe_config import Experts
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.weights import CheckpointTensor

# These weights are divided by rows, which are outputs, or by columns, which are inputs.
BY_ROWS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"}
BY_COLUMNS = {"o_proj", "down_proj"}


def config_of_rank(full_config: ModelConfig, size: int) -> ModelConfig:
    """Return the sizes of one rank's model. Raises ValueError if `size` cannot divide the model.

    If there are fewer KV heads than ranks, several ranks hold the same KV head.
    """
    heads, kv_heads = full_config.num_heads, full_config.num_kv_heads
    inner = [full_config.intermediate_size]
    changed: dict[str, Any] = {}
    experts: Experts | None = getattr(full_config, "experts", None)
    if experts is not None:
        has_dense = len(experts.layers) < full_config.num_layers
        inner = [experts.size, *inner[:has_dense]]
        changed["experts"] = replace(experts, size=experts.size // size)

    def divides(size: int) -> bool:
        divides_inner = not any(n % size for n in inner)
        return divides_inner and not (heads % size or (kv_heads % size and size % kv_heads))

    if not divides(size):
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if divides(n))
        units = " and ".join(map(str, inner))
        raise ValueError(
            f"tensor_parallel_size={size} does not divide this model: it must divide the {heads} "
            f"query heads and the {units} feed-forward units, and divide the {kv_heads} KV heads "
            f"or be a multiple of them; use one of {fitting}"
        )
    return replace(
        full_config,
        intermediate_size=full_config.intermediate_size // size,
        num_heads=heads // size,
        num_kv_heads=-(-kv_heads // size),
        vocab_size=-(-full_config.vocab_size // size),
        **changed,
    )


def tensors_of_rank(
    tensors: Iterable[CheckpointTensor], full_config: ModelConfig, rank: int, size: int
) -> Iterator[CheckpointTensor]:
    """Yield the tensors of a rank's model with their shapes in the checkpoint and their slices."""
    for tensor in tensors:
        module, kind = tensor.name.split(".")[-2:]
        if module in BY_ROWS:
            rows, index = tensor.shape[0] * size, rank
            if module in ("k_proj", "v_proj"):
                copies = max(1, size // full_config.num_kv_heads)  # ranks with the same KV head
                rows, index = rows // copies, rank // copies
            elif module in ("embed_tokens", "lm_head"):
                rows = full_config.vocab_size  # the last rank may have fewer
            yield _some_rows(tensor, rows, index)
        elif module in ("qkv_proj", "gate_up_proj"):
            number, kept = _fused_rows(module, full_config, rank, size)
            yield replace(tensor, shape=(number, *tensor.shape[1:]), slices=(kept,))
        elif module in BY_COLUMNS and kind == "weight":
            outputs, inputs = tensor.shape
            columns = slice(rank * inputs, (rank + 1) * inputs)
            slices = (slice(None), columns)
            yield replace(tensor, shape=(outputs, inputs * size), slices=slices)
        elif module in BY_COLUMNS and rank > 0:  # a bias, which only one rank may add
            yield _zeros(tensor)
        else:
            yield tensor


def _fused_rows(module: str, full_config: ModelConfig, rank: int, size: int) -> tuple[int, Tensor]:
    """Return how many rows a tensor of several projections has, and which of them a rank holds."""
    kv_heads, dim = full_config.num_kv_heads, full_config.head_dim
    parts = [(full_config.intermediate_size, 1)] * 2  # of gate_up_proj: units, rows of each
    if module == "qkv_proj":
        parts = [(full_config.num_heads, dim), (kv_heads, dim), (kv_heads, dim)]
    kept: list[int] = []
    end = 0
    for units, rows in parts:
        start = end + rank * units // size * rows
        kept += range(start, start + -(-units // size) * rows)
        end += units * rows
    return end, torch.tensor(kept, device="cpu")


def _zeros(tensor: CheckpointTensor) -> CheckpointTensor:
    """Return a tensor with zeros in place of its values."""
    return replace(tensor, store=lambda values: tensor.store(torch.zeros_like(values)))


def _some_rows(tensor: CheckpointTensor, rows: int, index: int) -> CheckpointTensor:
    """Return slice `index` of a tensor with `rows` rows. Missing rows are filled with 0."""
    num = tensor.shape[0]
    start = min(index * num, rows)
    stop = min(start + num, rows)

    def store(rows: Tensor) -> None:
        missing = num - len(rows)
        tensor.store(F.pad(rows, (0, 0, 0, missing)) if missing else rows)

    return replace(
        tensor, shape=(rows, *tensor.shape[1:]), slices=(slice(start, stop),), store=store
    )
