"""Computes a whole step in one call: the class that calls kernels/fused_step.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu.attention import (
    MIN_SAVED_TOKENS,
    NumbaAttention,
    balanced,
    follow_torch,
)
from nanovllm.backends.cpu.kernels import sampler
from nanovllm.backends.cpu.kernels.few_queries import AttentionWork, QueryGroups
from nanovllm.backends.cpu.kernels.fused_decode import NO_STATES, BlocksLinear, FusedLayers
from nanovllm.backends.cpu.kernels.fused_step import Head, Host, group_blocks, sample_tokens
from nanovllm.backends.cpu.kernels.int8 import PackedWeight
from nanovllm.backends.cpu.kernels.parallel import address_for
from nanovllm.backends.cpu.linear import PACKED_FOR
from nanovllm.plan import ResultKind, StepPlan

if TYPE_CHECKING:
    from nanovllm.runner.rows import Rows


class FusedStep:
    """Computes steps of at most PACKED_FOR tokens, all of which are sampled, of rows without rules.

    They are decodes, and verifications of drafts (features/requests/ngram.py).
    """

    def __init__(self, layers: FusedLayers, attention: NumbaAttention, rows: Rows) -> None:
        model, dtype = layers.model, layers.model.backend.dtype
        self.layers, self.rows = layers, rows
        size, rotary = model.config.vocab_size, model.rotary.table
        table: Any = model.embed_tokens
        is_int8 = isinstance(table, PackedWeight)
        tensors = (table.values, table.scale) if is_int8 else (table,)
        embeddings = (*(tensor.data_ptr() for tensor in tensors), 0)[:2]
        tables = *embeddings, rotary.data_ptr(), rotary.shape[1], MIN_SAVED_TOKENS
        self.last_tokens = rows.last_tokens.numpy()
        host = rows.positions, rows.block_tables, self.last_tokens, rows.params, rows.seeds
        self.host = Host(*host, *tables)
        self.logits = torch.empty(PACKED_FOR, size, dtype=dtype)
        kernels = (
            address_for(kernel, dtype, dtype) for kernel in (group_blocks, sampler.draw_rows)
        )
        addresses = model.norm.data_ptr(), self.logits.data_ptr(), *kernels
        self.head = Head._make((*layers.head, *addresses, size, dtype is torch.bfloat16))
        self.max_queries = attention.max_queries
        self.tables = np.zeros_like(rows.block_tables[:1].repeat(PACKED_FOR, 0))
        self.lse = np.full((PACKED_FOR, model.config.num_heads), -np.inf, np.float32)
        sizes = *[model.config.hidden_size] * 2, *[model.config.head_dim] * 2
        self.inputs = tuple(torch.empty(PACKED_FOR, size, dtype=dtype) for size in sizes)
        none = np.empty((0, 1), np.int64)
        self.none = QueryGroups(none, none, self.tables[:0])
        work, slots = AttentionWork(self.none, self.none, self.lse), np.empty(PACKED_FOR, np.int64)
        self.step, self.buffers = layers.make_step(self.inputs, slots, work, attention.shape)

    def __call__(self, plan: StepPlan) -> np.ndarray | None:
        """Return the tokens [T] that are sampled in a step, or None if this is not for it."""
        chunks, decode_rows = plan.chunks, plan.decode_rows
        for chunk in chunks:
            is_sampled = len(chunk.token_ids) == 1 + chunk.num_drafts
            if not is_sampled or chunk.result_kind is not ResultKind.TOKEN or chunk.logprob_targets:
                return None
        lens = [*(len(chunk.token_ids) for chunk in chunks), *[1] * len(decode_rows)]
        row_of = [*(chunk.row for chunk in chunks), *decode_rows]
        count, size = sum(lens), min(max(lens), self.max_queries)
        if count > PACKED_FOR or self.rows.rules_of(row_of) is not None:
            return None
        follow_torch()
        rows, tokens = np.array(decode_rows, np.int64), self.last_tokens[decode_rows]
        groups, parts = np.arange(len(row_of)), numba.get_num_threads()
        if chunks:
            rows = np.repeat(row_of, lens)
            tokens = np.array([t for c in chunks for t in c.token_ids] + tokens.tolist())
            groups = np.repeat(groups, [-(-number // size) for number in lens])
        places = np.zeros(len(groups), np.int64)
        if len(groups) > 1:
            order = balanced(self.rows.positions[row_of][groups], parts)
            places[order] = np.arange(len(groups))
        # `sample_tokens` fills these arrays in.
        queries, context_lens = np.empty((2, len(groups), size), np.int64)
        rest = QueryGroups(queries, context_lens, self.tables[: len(groups)])
        step = self.step._replace(
            rows=count,
            slot_mapping=self.step.slot_mapping[:count],
            attention=AttentionWork(self.none, rest, self.lse[:count]),
            parts=parts,
        )
        arguments = self.layers.code, step, self.layers.addresses, NO_STATES, self.host, self.head
        return tokens if sample_tokens(*arguments, rows, places, tokens) else None


def fuse_step(layers: FusedLayers, attention: NumbaAttention, rows: Rows) -> FusedStep | None:
    """Return the FusedStep of a model, or None if it does not read the model's tables."""
    model = layers.model
    table, linear, dtype = model.embed_tokens, model.backend.linear, model.backend.dtype
    is_packed = not isinstance(linear, BlocksLinear) or id(model.lm_head) in linear.addresses
    is_read = isinstance(table, PackedWeight) or (isinstance(table, Tensor) and not table.is_mkldnn)
    if not (is_packed and is_read and model.rotary.table.dtype is table.dtype is dtype):
        return None
    return FusedStep(layers, attention, rows)
