"""Computes a whole decode step in one call: the class that calls kernels/fused_step.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu.attention import MIN_SAVED_TOKENS, NumbaAttention, follow_torch
from nanovllm.backends.cpu.kernels import sampler
from nanovllm.backends.cpu.kernels.fused_decode import FusedLayers, Step, UnitLinear
from nanovllm.backends.cpu.kernels.fused_step import Head, Host, decode_rows, group_blocks
from nanovllm.backends.cpu.kernels.int8 import PackedWeight
from nanovllm.backends.cpu.kernels.parallel import address_for
from nanovllm.backends.cpu.kernels.units.any import AttentionWork, QueryGroups
from nanovllm.backends.cpu.linear import PACKED_FOR

if TYPE_CHECKING:
    from nanovllm.runner.rows import Rows


class FusedStep:
    """Computes decode steps of at most PACKED_FOR rows without rules."""

    def __init__(self, layers: FusedLayers, attention: NumbaAttention, rows: Rows) -> None:
        model, dtype = layers.model, layers.model.backend.dtype
        self.layers, self.rows, self.shape = layers, rows, attention.shape
        self.key, self.buffers = (0, 0), list[Tensor]()  # of the last step
        size, rotary = model.config.vocab_size, model.rotary.table
        table: Any = model.embed_tokens
        is_int8 = isinstance(table, PackedWeight)
        tensors = (table.values, table.scale) if is_int8 else (table,)
        embeddings = (*(tensor.data_ptr() for tensor in tensors), 0)[:2]
        host = rows.positions, rows.block_tables, rows.last_tokens.numpy(), rows.params, rows.seeds
        tables = *embeddings, rotary.data_ptr(), rotary.shape[1], MIN_SAVED_TOKENS
        self.host = Host(*host, *tables)
        self.logits = torch.empty(PACKED_FOR, size, dtype=dtype)
        kernels = (
            address_for(kernel, dtype, dtype) for kernel in (group_blocks, sampler.draw_rows)
        )
        addresses = model.norm.data_ptr(), self.logits.data_ptr(), *kernels
        self.head = Head._make((*layers.head, *addresses, size, dtype is torch.bfloat16))

    def __call__(self, decode_rows_: list[int]) -> np.ndarray | None:
        """Return the tokens [R] that are sampled for rows [R], or None if this is not for them."""
        if len(decode_rows_) > PACKED_FOR or self.rows.rules_of(decode_rows_) is not None:
            return None
        follow_torch()
        rows, layers = np.array(decode_rows_), self.layers
        key = len(rows), numba.get_num_threads()
        if key != self.key:
            self.step, self.buffers = self.make_step(len(rows))
            self.key = key
        tokens = np.empty(len(rows), np.int64)
        arguments = layers.code, self.step, layers.addresses, self.host, self.head
        return tokens if decode_rows(*arguments, rows, tokens) else None

    def make_step(self, count: int) -> tuple[Step, list[Tensor]]:
        """Return a step of so many rows, whose arrays `decode_rows` fills in, and its buffers."""
        config, dtype = self.layers.config, self.layers.model.backend.dtype
        sizes = *[config.hidden_size] * 2, *[config.head_dim] * 2
        inputs = tuple(torch.empty(count, size, dtype=dtype) for size in sizes)
        queries, lens = np.empty((2, count, 1), np.int64)
        tables = np.zeros_like(self.host.block_tables[:count])
        rest = QueryGroups(queries, lens, tables)
        none = QueryGroups(queries[:0], lens[:0], tables[:0])
        lse = np.full((count, config.num_heads), -np.inf, np.float32)
        arrays = np.empty(count, np.int64), AttentionWork(none, rest, lse)
        step, buffers = self.layers.make_step(inputs, *arrays, self.shape)
        return step, [*inputs, *buffers]


def fuse_step(layers: FusedLayers, attention: NumbaAttention, rows: Rows) -> FusedStep | None:
    """Return the FusedStep of a model, or None if it does not read the model's tables."""
    model = layers.model
    table, linear, dtype = model.embed_tokens, model.backend.linear, model.backend.dtype
    is_packed = not isinstance(linear, UnitLinear) or id(model.lm_head) in linear.addresses
    is_read = isinstance(table, PackedWeight) or (isinstance(table, Tensor) and not table.is_mkldnn)
    if not (is_packed and is_read and model.rotary.table.dtype is table.dtype is dtype):
        return None
    return FusedStep(layers, attention, rows)
