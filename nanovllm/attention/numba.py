"""The CPU's backend: kernels that Numba compiles for decodes, torch's attention for prompts.

Owns: the KV cache, through the plain backend, which computes what has more than one query. Given:
batches. Mutates: the slots of the tokens it is told to store, nothing else.

At one query each a step does little else than read KV. A prefix whose blocks are the same in all
tables of a group is read once for all, by torch's flash attention; from what it found the kernel goes on
with each sequence's own blocks, as flash decoding merges its parts (arXiv:2311.01282).

Shapes: T tokens of the step, N sequences of a group, H = K * G query heads that share K KV heads in
groups of G, D head size, B slots of a block, P slots of the shared prefix.
"""

import logging
import os
import time
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.sdpa import Group, Scratch, SdpaAttention
from nanovllm.config import ModelConfig
from nanovllm.kernels import cpu
from nanovllm.runner.batch import ForwardBatch

logger = logging.getLogger("nanovllm")

# What torch's own attention calls, which gives (out, log of the sum of exponentials).
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

MAX_OWN = 64  # tokens that a chunk whose queries are taken one by one may read on its own
MIN_SAVED = 256  # tokens that a shared prefix must save the reading of, to be worth its calls


@dataclass(slots=True)
class Decodes:
    """N queries of as many sequences; or of fewer, each token of a chunk as if it were a sequence."""

    tokens: Any  # [N] int64, the queries among the step's tokens
    tables: Any  # [N, blocks] int32, without the shared ones
    contexts: Any  # [N] int64, likewise
    prefix: "Prefix | None"


@dataclass(slots=True)
class Prefix:
    queries: Tensor  # [K * N * G] int64, of the projection as [rows, D]
    rows: Tensor  # [2 * K * P / B] int64, of a layer's cache as [rows, B * D]: K, then V


@dataclass(slots=True)
class Step:
    """What all layers share."""

    slots: Any  # [T] int64
    decodes: list[Decodes]
    groups: list[Group]  # of the other sequences


class NumbaAttention:
    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_blocks` counts the null block. The cache is allocated, not cleared."""
        self.process = os.getpid()
        self.plain = SdpaAttention(config, num_blocks, block_size, dtype, device)
        self.cache = self.plain.cache
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.group, self.eps = self.heads // self.kv_heads, config.rms_norm_eps
        self.like = cpu.LIKE[dtype]
        self.scratch = Scratch(dtype, device)
        self.shape = (num_blocks, self.kv_heads, block_size, self.dim)
        self.at = [(layer[0].data_ptr(), layer[1].data_ptr()) for layer in self.cache]  # K and V
        start = time.perf_counter()
        fits = dtype is torch.bfloat16 and cpu.fits_tiles(self.group, block_size, self.dim)
        self.in_tiles = True if fits and cpu.has_matrix_units() else None
        cpu.compile_all(self.like, self.in_tiles)
        if (seconds := time.perf_counter() - start) > 1.5:
            kept = "for the next start too" if cpu.keeps_code() else "not kept: set NUMBA_CACHE_DIR"
            logger.info("the CPU's kernels compiled in %.1f s; %s", seconds, kept)

    # ---- once a step ----

    def prepare(self, batch: ForwardBatch) -> None:
        if os.getpid() != self.process:  # the threads of OpenMP are not in a forked process
            raise RuntimeError(
                "this LLM was made in another process; make one in each, or spawn them"
            )
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
        starts = batch.query_start.numpy().astype(np.int64)
        contexts = batch.context_lens.numpy().astype(np.int64)
        tables, queries = batch.block_tables.numpy(), np.diff(starts)
        size, first = self.shape[2], len(queries) - batch.num_decodes

        def decodes_of(members: Any, shared: int) -> Decodes:
            of = np.repeat(members, queries[members])  # the sequence of each query
            ends = np.cumsum(queries[members])
            at = np.arange(len(of)) - np.repeat(ends - queries[members], queries[members])
            own = contexts[of] - queries[of] + 1 + at - shared * size
            width = shared + -(-int(own.max()) // size)
            tokens = starts[of] + at
            prefix = self._prefix(tokens, tables[members[0], :shared]) if shared else None
            return Decodes(tokens, np.ascontiguousarray(tables[of, shared:width]), own, prefix)

        short = self._short_chunks(first, queries, contexts, tables)
        decodes = [decodes_of(members, shared) for members, shared in short]
        if batch.num_decodes:
            found = shared_prefixes(tables[first:], contexts[first:], size)
            decodes += [decodes_of(first + members, shared) for members, shared in found]
        chunks = np.setdiff1d(np.arange(first), [i for members, _ in short for i in members])
        batch.attention = Step(batch.slots.numpy(), decodes, self.plain.groups(batch, chunks))

    def _short_chunks(
        self, first: int, queries: Any, contexts: Any, tables: Any
    ) -> list[tuple[Any, int]]:
        """Of the `first` sequences groups of short chunks behind a prefix that they share, and its
        blocks: each of their tokens may be taken as if it decoded."""
        size = self.shape[2]
        short = np.flatnonzero((queries < contexts)[:first] & (queries <= MAX_OWN)[:first])
        if not len(short):
            return []
        past = (contexts - queries)[short]
        groups = shared_prefixes(tables[short], past + 1, size)
        return [
            (short[members], shared)
            for members, shared in groups
            if shared and (contexts[short[members]] - shared * size).max() <= MAX_OWN
        ]

    def _prefix(self, tokens: Any, blocks: Any) -> Prefix:
        num_blocks, kv_heads, *_ = self.shape
        heads = np.arange(self.heads).reshape(kv_heads, 1, self.group)
        queries = tokens[:, None] * (self.heads + 2 * kv_heads) + heads  # [K, N, G]
        kinds = np.array([0, num_blocks]).reshape(2, 1, 1)
        rows = (kinds + blocks) * kv_heads + np.arange(kv_heads)[:, None]  # [2, K, P / B]
        return Prefix(torch.from_numpy(queries.ravel()), torch.from_numpy(rows.ravel()))

    # ---- once a layer ----

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        step: Step = batch.attention
        k_cache, v_cache = self.at[layer]
        weights = [0 if w is None else w.data_ptr() for w in (q_norm, k_norm)]
        arguments = (
            qkv.data_ptr(), *weights, cos.data_ptr(), sin.data_ptr(), k_cache, v_cache,
            step.slots, self.shape, self.heads, self.eps, self.like,
        )  # fmt: skip
        if qkv.numel() <= cpu.FEW:
            cpu.turn_and_store_rows(*arguments, 0, len(qkv))
        else:
            cpu.turn_and_store(*arguments, numba.get_num_threads())

        out = torch.empty((len(qkv), self.heads * self.dim), dtype=qkv.dtype)
        if step.groups:
            queries = qkv.view(len(qkv), -1, self.dim)[:, : self.heads]
            self.plain.attend_groups(step.groups, layer, queries, out.view(queries.shape))
        for d in step.decodes:
            # `before` holds the tensors until the kernel has read them.
            before = None if d.prefix is None else self._read_prefix(d.prefix, layer, qkv)
            first_out, first_lse = (0, 0) if before is None else (x.data_ptr() for x in before)
            cpu.attend_decode(
                qkv.data_ptr(), *qkv.shape, k_cache, v_cache, self.shape,
                d.tokens, d.tables, d.contexts, first_out, first_lse,
                out.data_ptr(), self.heads, self.like, self.in_tiles,
            )  # fmt: skip
        return out

    def _read_prefix(self, prefix: Prefix, layer: int, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """What N queries find in it, and the log of its sum of exponentials: torch is given one
        sequence with N * G queries for each KV head. In memory [K, N * G, D], float32 [N * G, K]."""
        blocks = self.cache[layer].view(-1, self.shape[2] * self.dim)
        keys, values = self.scratch.rows(blocks, prefix.rows).view(
            2, 1, self.kv_heads, -1, self.dim
        )
        queries = qkv.view(-1, self.dim).index_select(0, prefix.queries)
        return flash_attention(queries.view(1, self.kv_heads, -1, self.dim), keys, values)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self.plain.copy_blocks(copies)


def shared_prefixes(tables: Any, contexts: Any, size: int) -> list[tuple[Any, int]]:
    """Groups of sequences (indices), and how many leading blocks all tables of a group share.

    Sequences that begin with the same block form a group, if together they save enough; all others
    form one that shares nothing. Each keeps at least one token of its own.
    """
    groups = []
    alone = np.ones(len(tables), bool)
    first, counts = np.unique(tables[:, 0], return_counts=True)
    for block in first[counts > 1]:
        members = np.flatnonzero(tables[:, 0] == block)
        most = (int(contexts[members].min()) - 1) // size
        same = (tables[members, :most] == tables[members[0], :most]).all(axis=0)
        shared = int(same.argmin()) if not same.all() else most
        if shared * size * (len(members) - 1) >= MIN_SAVED:
            groups.append((members, shared))
            alone[members] = False
    if alone.any():
        groups.append((np.flatnonzero(alone), 0))
    return groups
