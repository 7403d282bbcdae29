"""Decode attention on a CPU: one query of each of many sequences, in a dozen calls a layer.

Owns: nothing but scratch space. Given: queries and the KV cache. Mutates: neither.

The contexts are ragged, and at one query each a step does little else than read KV. So nothing that
reads KV is padded to the longest context:

    K   tile by tile, CHUNK slots of one sequence and one KV head: one batched product for all
        tiles of the batch, of a tile with the queries that share its head
    V   an embedding bag: the weighted sum of a ragged list of rows, read where they lie

Between the two stand the scores, which are small and may be padded. What nobody wrote is not to reach
a sum (it may be NaN): of K it gives scores that are masked, of V it is not in the lists.

A prefix whose blocks are the same in all tables of a group is read once, by one product with the
queries of all sequences. Its scores stand before each sequence's own in one softmax: the same as
merging two softmaxes by their log-sum-exp, as flash decoding does (arXiv:2311.01282).

Shapes: T tokens of the step, N sequences of the group, H = K * G query heads that share K KV heads in
groups of G, D head size, B slots of a block, P slots of the shared prefix, R tiles of C slots.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK = 32  # slots of a tile, or one block if that is more; measured: 16 and 64 are 10 % slower
MAX_SEQS = 64  # of a group, which bounds the scores,
TILE_BYTES = 32 << 20  # and K of their own contexts, which bounds the tiles
KEPT_BYTES = 64 << 20  # of scratch memory
MIN_SAVED = 256  # tokens that a shared prefix must save the reading of, to be worth its calls


@dataclass(slots=True)
class Decodes:
    """N sequences that decode together. Rows of the caches: [blocks * K, B * D] or, of V, * B, D."""

    tokens: Tensor  # [N] int64, their queries among the step's tokens
    query_rows: Tensor  # [K * R], of q as [T * K, G * D]: the queries of each tile
    key_rows: Tensor  # [K * R * C / B]: the blocks of each tile
    score_rows: Tensor  # [K * N * G * tiles], of the scores as [K * R * G, C]: padded, in order
    hidden: Tensor  # [N, 1, tiles * C] bool: slots that are not of the context
    picks: Tensor  # [sum of own contexts * H], of the probabilities: those that are not padding
    value_rows: Tensor  # the same, of V
    offsets: Tensor  # [K * N * G]: where in these two each query's list begins
    shared_rows: Tensor | None  # [K * P / B]: the blocks of the prefix
    shared_queries: Tensor  # [K * N], of q as [T * K, G * D]


class DecodeAttention:
    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kv_heads, self.group, self.dim = kv_heads, heads // kv_heads, head_dim
        self.block_size = block_size
        self.tile_blocks = max(1, CHUNK // block_size)
        self.itemsize, self.device = dtype.itemsize, device
        self.scratch = Scratch(dtype, device)

    # ---- once a step ----

    def prepare(self, tokens: Any, contexts: Any, tables: Any) -> list[Decodes]:
        """tokens [N], contexts [N], tables [N, blocks] (int32, for speed) of all that decode."""
        groups = []
        most = max(1, TILE_BYTES // (self.kv_heads * self.dim * self.itemsize))
        for members, shared in shared_prefixes(tables, contexts, self.block_size):
            own = np.cumsum(contexts[members] - shared * self.block_size)
            part = np.arange(len(members)) // MAX_SEQS + (own - 1) // most
            cuts = np.flatnonzero(np.diff(part)) + 1
            groups += [
                self._decodes(tokens[m], contexts[m], tables[m], shared)
                for m in np.split(members, cuts)
            ]
        return groups

    def _decodes(self, tokens: Any, contexts: Any, tables: Any, shared: int) -> Decodes:
        size, kv_heads, group, n = self.block_size, self.kv_heads, self.group, len(tokens)
        own = contexts - shared * size  # at least 1
        head = np.arange(kv_heads, dtype=np.int32)[:, None]

        # K: the tiles of all sequences side by side. Past a table's end any block will do.
        per_tile = self.tile_blocks
        tiles = -(-own // (size * per_tile))
        owner, at = ragged(tiles)
        columns = shared + at[:, None] * per_tile + np.arange(per_tile)
        blocks = tables[owner[:, None], np.minimum(columns, tables.shape[1] - 1)]
        # The scores of tile r, query g, stand in row r * G + g of those of a KV head.
        most = int(tiles.max())
        tile = (np.cumsum(tiles) - tiles)[:, None] + np.minimum(np.arange(most), tiles[:, None] - 1)
        score = tile[:, None, :] * group + np.arange(group)[:, None]  # [N, G, most]

        # V: one list for each query.
        width = shared * size + most * per_tile * size
        query, at = ragged(np.repeat(own, group))  # [sum of own contexts * G]
        block = tables[query // group, shared + at // size]
        pick = query * width + shared * size + at
        value = block * (kv_heads * size) + at % size
        lengths = np.tile(np.repeat(own, group), kv_heads)

        prefix = tables[0, :shared] * kv_heads + head
        queries = tokens * kv_heads + head  # [K, N]
        return Decodes(
            tokens=torch.from_numpy(tokens).to(self.device),
            query_rows=self._send(queries[:, owner]),
            key_rows=self._send(blocks.ravel() * kv_heads + head),
            score_rows=self._send(score.ravel() + head * (len(owner) * group)),
            hidden=torch.from_numpy(np.arange(most * per_tile * size) >= own[:, None, None]).to(
                self.device
            ),
            picks=self._send(pick + head * (n * group * width)),
            value_rows=self._send(value + head * size),
            offsets=self._send(np.cumsum(lengths) - lengths),
            shared_rows=self._send(prefix) if shared else None,
            shared_queries=self._send(queries),
        )

    def _send(self, index: Any) -> Tensor:
        return torch.from_numpy(index.astype(np.int32, copy=False).ravel()).to(self.device)

    # ---- once a layer ----

    def attend(self, d: Decodes, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q [T, H, D], caches [blocks, K, B, D] -> [N, H, D]."""
        kv_heads, group, dim, n = self.kv_heads, self.group, self.dim, len(d.tokens)
        rows = k_cache.view(-1, self.block_size * dim)
        queries = q.reshape(-1, group * dim)

        tiles = queries.index_select(0, d.query_rows).view(-1, group, dim)  # [K * R, G, D]
        keys = self.scratch.gather(rows, d.key_rows).view(len(tiles), -1, dim)  # [K * R, C, D]
        scores = self._scores(tiles, keys)
        scores = scores.view(-1, keys.shape[1]).index_select(0, d.score_rows)
        scores = scores.view(kv_heads, n, group, -1).masked_fill_(d.hidden, float("-inf"))
        if d.shared_rows is not None:
            together = queries.index_select(0, d.shared_queries).view(kv_heads, -1, dim)
            keys = rows.index_select(0, d.shared_rows).view(kv_heads, -1, dim)  # [K, P, D]
            prefix = self._scores(together, keys).view(kv_heads, n, group, -1)
            scores = torch.cat((prefix, scores), dim=-1)
        probs = scores.softmax(dim=-1)  # [K, N, G, P + own]; inside, in float32

        out = torch.embedding_bag(
            v_cache.view(-1, dim),
            d.value_rows,
            d.offsets,
            mode=0,  # the sum
            per_sample_weights=probs.view(-1).index_select(0, d.picks),
        )[0]  # [K * N * G, D]
        if d.shared_rows is not None:
            values = v_cache.view(rows.shape).index_select(0, d.shared_rows)
            values = values.view(kv_heads, -1, dim)  # [K, P, D]
            weights = probs.view(kv_heads, n * group, -1)[..., : values.shape[1]]
            out = out.view(kv_heads, -1, dim).baddbmm_(weights, values)
        return out.view(kv_heads, n, group, dim).transpose(0, 1).reshape(n, -1, dim)

    def _scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries [X, Q, D], keys [X, L, D] -> [X, Q, L], scaled before they are rounded."""
        none = queries.new_empty(1)
        return torch.baddbmm(none, queries, keys.transpose(1, 2), beta=0, alpha=self.dim**-0.5)


class Scratch:
    """Memory for gathered rows, kept: a new tensor is new pages, which cost more than the rows."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=dtype, device=device)

    def gather(self, rows: Tensor, index: Tensor) -> Tensor:
        """rows[index], which stands until the next call."""
        size = len(index) * rows.shape[1]
        if size * rows.itemsize > KEPT_BYTES:
            return rows.index_select(0, index)
        if self.memory.numel() < size:
            self.memory = self.memory.new_empty(size * 5 // 4)
        out = self.memory[:size].view(-1, rows.shape[1])
        return torch.index_select(rows, 0, index, out=out)


def ragged(lengths: Any) -> tuple[Any, Any]:
    """Lists of these lengths, end to end: of each entry its list, and its place in it. int32."""
    owner = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    return owner, np.arange(len(owner), dtype=np.int32) - np.repeat(starts, lengths)


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
