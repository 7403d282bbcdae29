"""The CPU's backend: Numba's kernels for decodes and short chunks, torch's attention for prompts.

Owns: the KV cache, through the plain backend, which computes the prompts. Given: batches. Mutates: the
slots of the tokens it is told to store, and the batch that it prepares.

At one query each a step does little else than read KV. A prefix whose blocks are the same in all
tables of a group is read first, for several queries at once: by the same kernel, or for many queries by
torch's flash attention. From what was found the kernel goes on with each sequence's own blocks, as flash
decoding merges its parts (arXiv:2311.01282).

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
from torch.nn import functional as F

from nanovllm.attention.sdpa import Group, Scratch, SdpaAttention
from nanovllm.config import ModelConfig
from nanovllm.kernels import cpu
from nanovllm.layers.linear import TOKENS, rounded
from nanovllm.runner.batch import ForwardBatch

logger = logging.getLogger("nanovllm")

# What torch's own attention calls, which gives (out, log of the sum of exponentials).
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

MAX_OWN = 64  # tokens that a chunk whose queries are taken as decodes are may read on its own
# Queries of a KV head in one prefix: more are faster by torch (960 of 512 tokens, 28 layers: 80 ms, not 240).
MANY = 128
MIN_SAVED = (
    256  # tokens that a shared prefix must save the reading of, to be worth a pass of its own
)


@dataclass(slots=True)
class Prefix:
    """What many of the queries read first, together."""

    tokens: Any  # [n] int64, of the step's
    queries: Tensor  # [K * n * G] int64, of the projection as [rows, D]
    rows: Tensor  # [2 * K * P / B] int64, of a layer's cache as [rows, B * D]: K, then V


@dataclass(slots=True)
class Step:
    """What all layers share."""

    slots: Any  # [T] int64
    reads: cpu.Reads | None
    prefixes: list[Prefix]
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
        start, threads = time.perf_counter(), torch.get_num_threads()
        fits = dtype is torch.bfloat16 and cpu.fits_tiles(self.group, block_size, self.dim)
        self.in_tiles = True if fits and cpu.has_matrix_units() else None
        cpu.compile_all(self.like, self.in_tiles)
        torch.set_num_threads(threads)  # Numba, when it starts its own, sets them to all cores
        if (seconds := time.perf_counter() - start) > 1.5:
            kept = "for the next start too" if cpu.keeps_code() else "not kept: set NUMBA_CACHE_DIR"
            logger.info("compiled in %.1f s; %s", seconds, kept)

    # ---- once a step ----

    def prepare(self, batch: ForwardBatch) -> None:
        """May add tokens that nobody reads to the batch, behind all others."""
        if os.getpid() != self.process:  # the threads of OpenMP are not in a forked process
            raise RuntimeError(
                "this LLM was made in another process; make one in each, or spawn them"
            )
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
        starts = batch.query_start.numpy().astype(np.int64)
        contexts = batch.context_lens.numpy().astype(np.int64)
        tables, queries = batch.block_tables.numpy(), np.diff(starts)
        size, first = self.shape[2], len(queries) - batch.num_decodes
        short = self._short_chunks(first, queries, contexts, tables)
        chunks = np.setdiff1d(np.arange(first), [i for members, _ in short for i in members])
        groups = short
        if batch.num_decodes:
            found = shared_prefixes(tables[first:], contexts[first:], size)
            groups = short + [(first + members, shared) for members, shared in found]
        batch.attention = step = Step(
            batch.slots.numpy(), None, [], self.plain.groups(batch, chunks)
        )
        if groups:
            self._reads(step, groups, starts, queries, contexts, tables)
        # oneDNN's products follow, and not the one call: rounded here once, not by linear() for each.
        many = step.groups or step.prefixes or starts[-1] > TOKENS
        more = rounded(int(starts[-1])) - int(starts[-1])
        if many and more and self.cache.dtype is torch.bfloat16:
            batch.input_ids = F.pad(batch.input_ids, (0, more))
            batch.positions = F.pad(batch.positions, (0, more))

    def _reads(
        self, step: Step, groups: list[tuple[Any, int]], starts: Any, queries: Any, contexts: Any,
        tables: Any,
    ) -> None:  # fmt: skip
        """To `step`, from groups of sequences and how many leading blocks each group shares."""
        size, together = self.shape[2], max(1, cpu.PACK // self.group)
        # Few rows are one call with all else (models/compiled.py), which torch can be no part of.
        many = sum(int(queries[members].sum()) for members, _ in groups) > TOKENS
        packed, first, lengths = [np.empty((0, together), np.int64)], [], []
        sequences, shared = [], []
        for members, number in groups:
            if number:
                tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in members])
                if many and len(tokens) * self.group > MANY:
                    step.prefixes.append(self._prefix(tokens, tables[members[0], :number]))
                elif together > 1:
                    filled = np.pad(tokens, (0, -len(tokens) % together), constant_values=-1)
                    packed.append(filled.reshape(-1, together))
                    first += [members[0]] * len(packed[-1])
                    lengths += [number] * len(packed[-1])
                else:  # nobody to share a pass with
                    number = 0
            sequences.append(members)
            shared.append(np.full(len(members), number))
        prefixes = cpu.Packs(
            np.concatenate(packed),
            np.repeat(np.array(lengths, np.int64)[:, None] * size, together, axis=1),
            tables[np.array(first, np.int64), : max(lengths, default=0)],
        )

        seqs = np.concatenate(sequences)
        together = min(together, int(queries[seqs].max()))
        each = -(-queries[seqs] // together)  # sequence's number of packs
        at = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
        seqs = np.repeat(seqs, each)[:, None]
        past = np.repeat(np.concatenate(shared), each)[:, None]  # blocks
        tokens = starts[seqs] + at[:, None] * together + np.arange(together)
        seen = contexts[seqs] - starts[seqs + 1] + 1 + tokens - past * size
        tokens[tokens >= starts[seqs + 1]] = -1
        columns = past + np.arange(-(-int((contexts[seqs] - past * size).max()) // size))
        own = cpu.Packs(tokens, seen, tables[seqs, np.minimum(columns, tables.shape[1] - 1)])
        lse = np.full((starts[-1], self.heads), -np.inf, np.float32)
        step.reads = cpu.Reads(prefixes, own, lse)

    def _prefix(self, tokens: Any, blocks: Any) -> Prefix:
        num_blocks, kv_heads, *_ = self.shape
        heads = np.arange(self.heads).reshape(kv_heads, 1, self.group)
        queries = tokens[:, None] * (self.heads + 2 * kv_heads) + heads  # [K, n, G]
        kinds = np.array([0, num_blocks]).reshape(2, 1, 1)
        rows = (kinds + blocks) * kv_heads + np.arange(kv_heads)[:, None]  # [2, K, P / B]
        return Prefix(tokens, torch.from_numpy(queries.ravel()), torch.from_numpy(rows.ravel()))

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
            cpu.turn_and_store_rows(*arguments, 0, len(step.slots))
        else:
            cpu.turn_and_store(*arguments, numba.get_num_threads())

        out = torch.empty((len(qkv), self.heads * self.dim), dtype=qkv.dtype)
        if step.groups:
            queries = qkv.view(len(qkv), -1, self.dim)[:, : self.heads]
            self.plain.attend_groups(step.groups, layer, queries, out.view(queries.shape))
        if step.reads is not None:
            for prefix in step.prefixes:
                self._read_prefix(prefix, step.reads.lse, layer, qkv, out)
            cpu.attend(
                qkv.data_ptr(), len(qkv), out.data_ptr(), self.heads, k_cache, v_cache, self.shape,
                step.reads, self.like, self.in_tiles, numba.get_num_threads(),
            )  # fmt: skip
        return out

    def _read_prefix(self, prefix: Prefix, lse: Any, layer: int, qkv: Tensor, out: Tensor) -> None:
        """To `lse` and `out`: torch is given one sequence with n * G queries for each KV head."""
        blocks = self.cache[layer].view(-1, self.shape[2] * self.dim)
        keys, values = self.scratch.rows(blocks, prefix.rows).view(
            2, 1, self.kv_heads, -1, self.dim
        )
        queries = qkv.view(-1, self.dim).index_select(0, prefix.queries)
        found, logs = flash_attention(queries.view(1, self.kv_heads, -1, self.dim), keys, values)
        apart = (len(prefix.tokens), self.group)  # [K, n * G] -> [n, K, G]
        found = found[0].unflatten(1, apart).transpose(0, 1)
        out[torch.from_numpy(prefix.tokens)] = found.reshape(len(prefix.tokens), -1)
        lse[prefix.tokens] = logs[0].unflatten(1, apart).transpose(0, 1).flatten(1).numpy()

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
