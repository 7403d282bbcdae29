"""Attention on a CPU: one kernel for decodes, chunks and prompts.

With one query per sequence a step does little else than read KV. Leading blocks that sequences
share are therefore read once for all of them. The kernel then continues with the other blocks of
each sequence, in the same order of sums as without sharing.

Shapes: T tokens of the step, N sequences, H = K * G query heads that share K KV heads in groups of
G, D head size, B slots of a block, P groups of up to M queries (kernels/attention.py).
"""

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu import memory
from nanovllm.backends.cpu.compile import compile_all
from nanovllm.backends.cpu.kernels import pointwise
from nanovllm.backends.cpu.kernels.attention import (
    KEYS,
    MAX_ROWS,
    AttentionWork,
    QueryGroups,
    attend,
    attend_groups,
)
from nanovllm.backends.cpu.kernels.parallel import address_for, follow_torch, run
from nanovllm.backends.cpu.kernels.primitives import DTYPE_EXAMPLE
from nanovllm.backends.cpu.kernels.words import TILE, is_tiled
from nanovllm.models.attention import PlainAttention
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.fp8 import FP8, to_fp8
from nanovllm.models.layers import Norms, Rope
from nanovllm.models.model_config import ModelConfig

# A shared prefix is read in a separate pass if that saves reading at least this many tokens.
MIN_SAVED_TOKENS = 256


class Sequences(NamedTuple):
    """The sequences of a step as arrays."""

    starts: np.ndarray  # [N + 1] int64, the first token of each, and T
    query_lens: np.ndarray  # [N] int64
    context_lens: np.ndarray  # [N] int64
    tables: np.ndarray  # [N, blocks] int32


class NumbaAttention(PlainAttention):
    def __init__(self, config: ModelConfig, *arguments: Any) -> None:
        super().__init__(config, *arguments)
        dtypes = self.dtype, self.cache.dtype
        self.heads = config.num_heads
        self.kv_heads = config.num_kv_heads
        self.dim = config.head_dim
        self.max_queries = max(1, MAX_ROWS * self.kv_heads // self.heads)  # of a group
        self.examples = [DTYPE_EXAMPLE[dtype] for dtype in dtypes]
        num_blocks, kv_heads, block_size, dim = self.cache.shape[2:]
        self.shape = num_blocks, kv_heads, block_size, dim
        self.is_tiled = is_tiled(self.block_size, self.dim)
        if self.is_tiled:
            self.layout = f"tiles of {TILE} slots"
        self.kv_addresses = [(layer[0].data_ptr(), layer[1].data_ptr()) for layer in self.cache]
        compile_all(*dtypes)
        self.attend_groups = address_for(attend_groups, *dtypes)

    @staticmethod
    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the cache on huge pages."""
        return memory.allocate(shape, dtype)

    # ---- the layout of the cache, in torch ----

    def tiles(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys [blocks, K, B / 16, D / n, 16, n] and values [blocks, K, B / n, D, n]."""
        n = 2 if self.cache.itemsize == 2 else 1
        k, v = self.cache[layer]
        k = k.view(*k.shape[:2], -1, self.dim // n, TILE, n)
        return k, v.view(*v.shape[:2], -1, self.dim, n)

    def store(self, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        if not self.is_tiled:
            super().store(layer, k, v, batch)
            return
        block, slot = batch.slot_mapping // self.block_size, batch.slot_mapping % self.block_size
        keys, values = self.tiles(layer)
        if self.cache.dtype == FP8:
            k, v = map(to_fp8, (k, v), self.scales[layer])
        n = keys.shape[-1]
        keys[block, :, slot // TILE, :, slot % TILE] = k.unflatten(2, (-1, n))
        values[block, :, slot // n, :, slot % n] = v

    def read_blocks(self, layer: int, blocks: Tensor) -> Tensor:
        if not self.is_tiled:
            return super().read_blocks(layer, blocks)
        keys, values = (tiles[blocks].to(self.dtype) for tiles in self.tiles(layer))
        keys, values = keys.permute(1, 0, 2, 4, 3, 5), values.permute(1, 0, 2, 4, 3)
        shape = 2, self.kv_heads, len(blocks) * self.block_size, self.dim
        return torch.stack((keys.flatten(), values.flatten())).view(shape)

    # ---- once per step ----

    def prepare(self, batch: ForwardBatch) -> None:
        """Group the queries that read the same blocks."""
        follow_torch()
        starts = batch.query_start_loc.numpy().astype(np.int64)
        contexts = batch.context_lens.numpy().astype(np.int64)
        seqs = Sequences(starts, np.diff(starts), contexts, batch.block_tables.numpy())
        groups, shared = self.shared_prefixes(seqs, batch.num_decodes)
        prefixes = self.prefix_groups(seqs, groups, shared)
        rest = self.groups_of_rest(seqs, shared)
        shape = (starts[-1], self.heads, self.dim + 2) if groups else (0, 0, 0)
        partial = np.empty(shape, np.float32)
        places = batch.positions.numpy(), batch.slot_mapping.numpy()
        batch.attention_metadata = AttentionWork(*places, prefixes, rest, partial)

    def shared_prefixes(
        self, seqs: Sequences, num_decodes: int
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Return groups of sequences [n] whose tables begin with the same blocks.

        Also returns how many tokens each sequence [N] shares, in whole segments: 0 if it is in no
        group, because sharing would not save enough. A prefix ends before the first query of each
        sequence.
        """
        groups: list[np.ndarray] = []
        shared = np.zeros_like(seqs.query_lens)
        past = seqs.context_lens - seqs.query_lens
        if len(past) < 2:
            return groups, shared
        # A prompt from its first token on may compute the blocks that others share. Decodes, which
        # are last, may share more blocks with each other than with chunks.
        is_decode = np.arange(len(past)) >= len(past) - num_decodes
        first_blocks = np.where(past > 0, 2 * seqs.tables[:, 0] + is_decode, -1)
        keys, counts = np.unique(first_blocks, return_counts=True)
        for key in keys[(counts > 1) & (keys >= 0)]:
            group = np.flatnonzero(first_blocks == key)
            tables = seqs.tables[group, : int(past[group].min()) // self.block_size]
            same = (tables == tables[0]).all(axis=0)
            number = len(same) if same.all() else int(same.argmin())
            tokens = number * self.block_size // KEYS * KEYS
            if tokens * (len(group) - 1) >= MIN_SAVED_TOKENS:
                groups.append(group)
                shared[group] = tokens
        return groups, shared

    def prefix_groups(
        self, seqs: Sequences, groups: list[np.ndarray], shared: np.ndarray
    ) -> QueryGroups:
        """Group the tokens that share a prefix by M = max_queries. Each attends to all of it."""
        queries = [np.empty((0, self.max_queries), np.int64)]
        readers = [np.empty(0, np.int64)]  # sequences whose tables begin with the prefix
        for group in groups:
            tokens = np.concatenate([np.arange(seqs.starts[i], seqs.starts[i + 1]) for i in group])
            rows = np.pad(tokens, (0, -len(tokens) % self.max_queries), constant_values=-1)
            queries.append(rows.reshape(-1, self.max_queries))
            readers.append(np.repeat(group[0], len(queries[-1])))
        reader = np.concatenate(readers)  # [P]
        return QueryGroups(
            np.concatenate(queries),  # [P, M]
            np.repeat(shared[reader, None], self.max_queries, axis=1),  # [P, M]
            np.zeros(len(reader), np.int64),  # [P]
            seqs.tables[reader, : -(-int(shared.max()) // self.block_size)],  # [P, blocks]
        )

    def groups_of_rest(self, seqs: Sequences, shared: np.ndarray) -> QueryGroups:
        """Group consecutive tokens of each sequence. They attend to all but its shared tokens.

        shared [N]. The order of groups gives parallel threads about the same work.
        """
        size = min(self.max_queries, int(seqs.query_lens.max()))  # M
        counts = -(-seqs.query_lens // size)  # [N], groups of each sequence
        members = np.repeat(np.arange(len(counts)), counts)  # [P]
        first = np.cumsum(counts) - counts  # [N], its first group
        index = np.arange(len(members)) - first[members]  # [P], within the sequence
        ends = seqs.starts[members + 1]  # [P]
        tokens = (seqs.starts[members] + index * size)[:, None] + np.arange(size)  # [P, M]
        visible = (seqs.context_lens[members] - ends + 1)[:, None] + tokens  # [P, M]
        tokens[tokens >= ends[:, None]] = -1
        num_blocks = -(-int(seqs.context_lens.max()) // self.block_size)
        order = balanced(visible[:, 0] - shared[members], numba.get_num_threads())  # [P]
        members = members[order]
        tables = seqs.tables[members, :num_blocks]
        return QueryGroups(tokens[order], visible[order], shared[members], tables)

    # ---- once per layer ----

    def norm_rope_store(
        self, layer: int, qkv: Tensor, norms: Norms, rope: Rope, batch: ForwardBatch
    ) -> Tensor:
        """Change qkv in place and return it as [T, H + 2K, D]: H heads of q, K of k and K of v."""
        follow_torch()  # its number of threads may have changed since the last layer
        slot_mapping = batch.attention_metadata.slot_mapping
        weights = (0, 0) if norms is None else [weight.data_ptr() for weight in norms]
        tensors = (qkv.data_ptr(), *weights, *(table.data_ptr() for table in rope))
        cache = (*self.kv_addresses[layer], slot_mapping, *self.shape)
        example, cache_example = self.examples
        weight_example = example if norms is None else DTYPE_EXAMPLE[norms[0].dtype]
        examples = example, weight_example, cache_example
        heads = self.heads, self.heads + 2 * self.kv_heads
        arguments = (*tensors, *cache, *heads, self.eps, *examples, *self.scales[layer])
        run(pointwise.norm_rope_store_rows, arguments, len(slot_mapping), qkv.numel())
        return qkv.view(len(qkv), heads[1], self.dim)

    def attend(self, layer: int, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """`qkv` [T, H + 2K, D] is the result of `norm_rope_store`."""
        out = qkv.new_empty(len(qkv), self.heads, self.dim)
        tensors = (qkv.data_ptr(), *qkv.shape[:2], out.data_ptr(), self.heads)
        cache = *self.kv_addresses[layer], self.shape
        work = batch.attention_metadata, self.windows[layer], self.scales[layer][1]
        kernel = *self.examples, self.attend_groups
        attend(*tensors, *cache, *work, *kernel, numba.get_num_threads())
        return out.flatten(1)


def balanced(sizes: np.ndarray, parts: int) -> np.ndarray:
    """Return an order in which `parts` equal slices have about the same total size.

    The items are dealt in order of size, back and forth: 0, 1, 1, 0, 0, 1 with two parts. Parts
    keep the order of the items, so groups that read the same blocks stay together.
    """
    turn = np.empty(len(sizes), np.int64)
    turn[np.argsort(sizes, kind="stable")] = np.arange(len(sizes)) % (2 * parts)
    return np.argsort(np.minimum(turn, 2 * parts - 1 - turn), kind="stable")
