"""Computes a whole step in one call: the class that calls kernels/decode_step.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch

from nanovllm.backends.cpu.attention import MIN_SAVED_TOKENS, NumbaAttention, balanced
from nanovllm.backends.cpu.kernels import sampler
from nanovllm.backends.cpu.kernels.attention import AttentionWork, QueryGroups
from nanovllm.backends.cpu.kernels.decode_step import Host, OutputLayer, sample_tokens
from nanovllm.backends.cpu.kernels.fused_layers import FEW_TOKENS, FusedLayers
from nanovllm.backends.cpu.kernels.layer_tables import NO_STATES
from nanovllm.backends.cpu.kernels.parallel import address_for, follow_torch
from nanovllm.backends.cpu.kernels.product import PackedWeight, pointers
from nanovllm.plan import ResultKind, StepPlan

if TYPE_CHECKING:
    from nanovllm.runner.rows import Rows


class FusedStep:
    """Computes steps of at most FEW_TOKENS tokens, all of which are sampled, of rows without rules.

    They are decodes, and verifications of drafts (features/sampling/ngram.py).
    """

    def __init__(self, layers: FusedLayers, attention: NumbaAttention, rows: Rows) -> None:
        model = layers.model
        config = layers.config
        dtype = model.backend.dtype  # also of the tables below
        self.layers = layers
        self.rows = rows
        table: Any = model.embed_tokens
        is_packed = isinstance(table, PackedWeight)
        rotary = model.rotary.table
        self.last_tokens = rows.last_tokens.numpy()
        self.host = Host(
            positions=rows.positions,
            block_tables=rows.block_tables,
            last_tokens=self.last_tokens,
            params=rows.params,
            seeds=rows.seeds,
            embeddings=(table.values if is_packed else table).data_ptr(),
            scale=table.scale.data_ptr() if is_packed else 0,
            table_width=table.product.width if is_packed else 1,
            factor=model.embedding_factor,
            rotary=rotary.data_ptr(),
            ropes=rotary.shape[1],
            max_len=rotary.shape[2],
            min_shared=MIN_SAVED_TOKENS,
        )
        head = model.lm_head
        weight, scale, bias = pointers(head)
        self.logits = model.norm.new_empty(FEW_TOKENS, config.vocab_size, dtype=dtype)
        self.head = OutputLayer(
            product=head.weight.product,
            weight=weight,
            scale=scale,
            bias=bias,
            norm=model.norm.data_ptr(),
            logits=self.logits.data_ptr(),
            draw=address_for(sampler.draw_rows, dtype, dtype),
            size=config.vocab_size,
            is_bf16=dtype is torch.bfloat16,
        )
        self.max_queries = attention.max_queries
        self.tables = np.zeros_like(rows.block_tables[:1].repeat(FEW_TOKENS, 0))
        self.first, self.slots = np.zeros((2, FEW_TOKENS), np.int64)
        sizes = *[config.hidden_size] * 2, *[config.head_dim * rotary.shape[1]] * 2
        self.inputs = tuple(self.logits.new_empty(FEW_TOKENS, size) for size in sizes)
        none = np.empty((0, 1), np.int64)
        self.no_groups = QueryGroups(none, none, none.ravel(), self.tables[:0])
        self.partial = np.empty((0, 0, 0), np.float32)

    def __call__(self, plan: StepPlan) -> np.ndarray | None:
        """Return the tokens [T] that are sampled in a step, or None if this is not for it."""
        chunks = plan.chunks
        decode_rows = plan.decode_rows
        for chunk in chunks:
            is_sampled = len(chunk.token_ids) == 1 + chunk.num_drafts
            if not is_sampled or chunk.result_kind is not ResultKind.TOKEN or chunk.logprob_targets:
                return None
        lens = [*(len(chunk.token_ids) for chunk in chunks), *[1] * len(decode_rows)]
        row_of = [*(chunk.row for chunk in chunks), *decode_rows]
        count = sum(lens)
        size = min(max(lens), self.max_queries)  # of a group
        if count > FEW_TOKENS or self.rows.rules_of(row_of) is not None:
            return None
        follow_torch()
        rows = np.array(decode_rows, np.int64)
        tokens = self.last_tokens[decode_rows]
        groups = np.arange(len(row_of))
        if chunks:
            rows = np.repeat(row_of, lens)
            tokens = np.array([t for c in chunks for t in c.token_ids] + tokens.tolist())
            groups = np.repeat(groups, [-(-number // size) for number in lens])
        places = np.zeros(len(groups), np.int64)
        if len(groups) > 1:
            order = balanced(self.rows.positions[row_of][groups], numba.get_num_threads())
            places[order] = np.arange(len(groups))
        # `sample_tokens` fills these arrays in.
        queries, context_lens = np.empty((2, len(groups), size), np.int64)
        first = self.first[: len(groups)]
        tables = self.tables[: len(groups)]
        rest = QueryGroups(queries, context_lens, first, tables)
        work = AttentionWork(
            np.empty(count, np.int64), self.slots[:count], self.no_groups, rest, self.partial
        )
        inputs = tuple(tensor[:count] for tensor in self.inputs)
        step = self.layers.make_step(inputs, work)
        layers = self.layers.kernels, step, self.layers.layers, NO_STATES
        is_done = sample_tokens(*layers, self.host, self.head, rows, places, tokens)
        return tokens if is_done else None
