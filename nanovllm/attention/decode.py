"""Decode attention on a CPU: one query of each of many sequences, in a dozen calls a layer.

Owns: nothing but scratch space. Given: queries and the KV cache. Mutates: neither.

The contexts are ragged, and at one query each a step does little else than read KV. So nothing that
reads KV is padded to the longest context:

    K   tile by tile, a few slots of one sequence and one KV head: one batched product for all tiles
        of the batch, of a tile with the queries that share its head
    V   an embedding bag: the weighted sum of a ragged list of rows, read where they lie

Between the two stand the scores, which are small and may be padded. What nobody wrote is not to reach
a sum (it may be NaN): of K it gives scores that nobody looks at, of V it is not in the lists.

With matrix units K too is read where it lies, a block a tile, where the blocks of the batch fill most
of the range from the first to the last. They are handed out side by side, so they often do. Elsewhere
K is gathered first.

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

GATHERED = 32  # slots of a tile of gathered K, or one block if that is more; 16, 64: 10 % slower
DENSE = 1.5  # times the blocks of the batch: the longest range that is read in place
MAX_SEQS = 64  # of a group, which bounds the scores,
TILE_BYTES = 32 << 20  # and K of their own contexts, which bounds the tiles
KEPT_BYTES = 64 << 20  # of each scratch memory
MIN_SAVED = 256  # tokens that a shared prefix must save the reading of, to be worth its calls
LEAD = 64  # scores before those of the first tile; the first of all is minus infinity


@dataclass(slots=True)
class Decodes:
    """N sequences that decode together. Rows of the caches: [blocks * K, B * D] or, of V, * B, D."""

    tokens: Tensor  # [N] int64, their queries among the step's tokens
    query_rows: Tensor  # [R * K], of q as [T * K, G * D]: the queries of each tile
    keys: slice | Tensor  # the range of blocks, or the rows [R * K * C / B] to gather
    scores: Tensor  # LEAD, then [R * K, C, G]: scratch that all groups share, used up in `attend`
    score_places: Tensor  # [K * N * G * L], of `scores`: in order, padded to L
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
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kv_heads, self.group, self.dim = kv_heads, heads // kv_heads, head_dim
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, device
        self.kv_bytes = kv_heads * head_dim * dtype.itemsize  # of K of one token
        # Measured, 28 layers of 16 x 192 tokens, blocks of 16: 29 ms in place and 33 gathered; without
        # matrix units 40 and 35; in float32, which has none, 58 and 51. Blocks of 4 are too small.
        self.in_place = (
            device.type == "cpu"
            and dtype is torch.bfloat16
            and block_size >= 8
            and torch.cpu._is_amx_tile_supported()
        )
        self.gathered, self.scores = Scratch(dtype, device), Scratch(dtype, device)

    # ---- once a step ----

    def prepare(self, tokens: Any, contexts: Any, tables: Any) -> list[Decodes]:
        """tokens [N], contexts [N], tables [N, blocks] (int32, for speed) of all that decode."""
        groups = []
        most = max(1, TILE_BYTES // self.kv_bytes)
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
        own = (contexts - shared * size).astype(np.int32)  # at least 1
        head = np.arange(kv_heads, dtype=np.int32)[:, None]

        # K: of each tile its owner; of each block its spot, counted over the blocks of all tiles.
        blocks = -(-own // size)
        owner, at = ragged(blocks)
        found = tables[owner, shared + at]
        first, last = int(found.min()), int(found.max()) + 1
        span = min(few_lengths(last - first), self.num_blocks)
        first = min(first, self.num_blocks - span)
        keys: slice | Tensor = slice(first, first + span)
        per_tile, spot = 1, found - first
        owners = np.full(span, -1, np.int32)  # as an index the last one: any will do
        owners[spot] = owner
        once = np.count_nonzero(owners >= 0) == len(found)  # no block is two sequences'
        if not (self.in_place and once and span <= DENSE * len(found)):
            per_tile = max(1, GATHERED // size)
            tiles = -(-blocks // per_tile)
            owners = np.full(few_lengths(int(tiles.sum())), -1, np.int32)
            owners[: int(tiles.sum())] = ragged(tiles)[0]
            spot = ((np.cumsum(tiles, dtype=np.int32) - tiles) * per_tile)[owner] + at
            rows = np.zeros((len(owners), 1, per_tile), np.int32)  # past a context's end: any block
            rows.reshape(-1)[spot] = found
            keys = self._send(rows * kv_heads + head)

        # Of each slot that a context fills, sequence by sequence: its score's place and V's row.
        filled = np.minimum(own[owner] - at * size, size)  # of each block
        _, slot = ragged(filled)
        length = per_tile * size
        place = spot // per_tile * (kv_heads * length) + spot % per_tile * size
        place = np.repeat(place, filled) + slot
        value = np.repeat(found * (kv_heads * size), filled) + slot

        # Scores: from [R, K, C, G] to [K, N, G, L]. What is negative here is padding.
        scores = self.scores.take(LEAD + len(owners) * kv_heads * length * group)
        scores[0] = float("-inf")
        longest = int(own.max())
        flat = np.full(n * longest, -(1 << 30), np.int32)  # stays negative, whatever is added
        flat[np.repeat(owner * longest + at * size, filled) + slot] = LEAD + place * group
        each = head * (length * group) + np.arange(group, dtype=np.int32)  # [K, G]
        places = flat.reshape(n, 1, longest) + each[:, None, :, None]
        np.maximum(places, 0, out=places)

        # V: one list for each query.
        width = shared * size + longest
        lengths = np.repeat(own, group)
        query, at = ragged(lengths)  # [sum of own contexts * G]
        value = value[np.repeat(np.repeat(np.cumsum(own) - own, group), lengths) + at]
        pick = query * width + (shared * size + at)
        lengths = np.tile(lengths, kv_heads)

        prefix = tables[0, :shared] * kv_heads + head
        queries = tokens.astype(np.int32) * kv_heads + head  # [K, N]
        return Decodes(
            tokens=torch.from_numpy(tokens).to(self.device),
            query_rows=self._send(queries.T[owners]),
            keys=keys,
            scores=scores,
            score_places=self._send(places),
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

        tiles = queries.index_select(0, d.query_rows).view(-1, group, dim)  # [R * K, G, D]
        found = k_cache[d.keys] if isinstance(d.keys, slice) else self.gathered.rows(rows, d.keys)
        self._products(found.view(len(tiles), -1, dim), tiles, d.scores[LEAD:])
        scores = d.scores.index_select(0, d.score_places).view(kv_heads, n, group, -1)
        if d.shared_rows is not None:
            together = queries.index_select(0, d.shared_queries).view(kv_heads, -1, dim)
            keys = rows.index_select(0, d.shared_rows).view(kv_heads, -1, dim)  # [K, P, D]
            prefix = self._products(together, keys).view(kv_heads, n, group, -1)
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

    def _products(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """a [X, I, D], b [X, J, D] -> [X, I, J], scaled before they are rounded."""
        if out is not None:
            out = out.view(len(a), a.shape[1], b.shape[1])
        none = a.new_empty(1)  # never read
        return torch.baddbmm(none, a, b.transpose(1, 2), beta=0, alpha=self.dim**-0.5, out=out)


class Scratch:
    """Memory that is kept: a new tensor is new pages, which cost more than what goes into them."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=dtype, device=device)

    def take(self, size: int) -> Tensor:
        """[size], whatever it holds; it stands until the next call."""
        if size * self.memory.itemsize > KEPT_BYTES:
            return self.memory.new_empty(size)
        if self.memory.numel() < size:
            most = KEPT_BYTES // self.memory.itemsize
            self.memory = self.memory.new_empty(min(size * 5 // 4, most))
        return self.memory[:size]

    def rows(self, rows: Tensor, index: Tensor) -> Tensor:
        """rows[index]"""
        out = self.take(len(index) * rows.shape[1]).view(-1, rows.shape[1])
        return torch.index_select(rows, 0, index, out=out)


def ragged(lengths: Any) -> tuple[Any, Any]:
    """Lists of these lengths, end to end: of each entry its list, and its place in it. int32."""
    owner = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    return owner, np.arange(len(owner), dtype=np.int32) - np.repeat(starts, lengths)


def few_lengths(length: int) -> int:
    """The length, or up to a sixteenth more.

    oneDNN makes code for each shape of a product, which takes it about a millisecond and a megabyte:
    more than the product itself, were the shape another one at every step.
    """
    unit = 1 << max(0, length.bit_length() - 5)
    return -(-length // unit) * unit


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
