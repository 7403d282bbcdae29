"""Paged attention: queries of any length over keys and values that lie scattered in blocks.

Owns: nothing. Given: q, one layer's cache and the batch's tables. Mutates: the output it returns.

Two launches share one inner loop, `_scan`, which walks a sequence's positions in tiles and keeps
the running maximum and sum of an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867):

- `attend`: any mix of query lengths. A program takes a tile of one sequence's queries.
- `attend_decode`: one query a sequence. There is little work in a row then, so the positions are
  split among programs (flash decoding, Dao et al. 2023) and `_merge` puts the parts together.

The query heads of a group read the same keys, so they are packed into the rows of one tile: K and V
are loaded once for all of them, and the matrix units have rows to work on.

    rows of the tile      keys, by position: block_table[position // block size]
    query 0, head 0   [ x x x x x . . . | . . . . . . . . ]
    query 0, head 1   [ x x x x x . . . | . . . . . . . . ]   x: position <= the query's own
    query 1, head 0   [ x x x x x x . . | . . . . . . . . ]   tiles wholly x need no mask at all
    query 1, head 1   [ x x x x x x . . | . . . . . . . . ]   tiles wholly . are never loaded

The cache of a layer is [blocks, K, block size, D]: what one head reads of one block is contiguous.
A slot that was never written may hold anything, NaN too: it is not loaded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.configs import Tile

LOG2E = 1.4426950408889634
MIN_SPLIT = 256  # positions below which a split costs more than it brings
MAX_SPLITS = 64


@triton.jit
def _blocks(table, at, end, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The physical blocks [TILE] of the positions from `at`; block 0 beyond `end`."""
    position = at + tl.arange(0, TILE)
    return tl.load(table + position // BLOCK, mask=position < end, other=0)


@triton.jit
def _tile(
    q, k_cache, v_cache, block, at, end, query_at, acc, row_max, row_sum, scale,
    BLOCK: tl.constexpr, BLOCK_STRIDE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the positions [at, at + TILE) into the softmax; `k_cache` points at the head."""
    dim = tl.arange(0, D_PAD)
    position = at + tl.arange(0, TILE)
    # 64-bit: a cache of more than 2^31 elements is an ordinary one.
    offset = block.to(tl.int64) * BLOCK_STRIDE + (position % BLOCK) * D
    k_at = k_cache + offset[None, :] + dim[:, None]  # [D, TILE]
    v_at = v_cache + offset[:, None] + dim[None, :]  # [TILE, D]
    if MASKED:
        known = position < end
        k = tl.load(k_at, mask=known[None, :] & (dim < D)[:, None], other=0.0)
        v = tl.load(v_at, mask=known[:, None] & (dim < D)[None, :], other=0.0)
    elif D < D_PAD:
        k = tl.load(k_at, mask=(dim < D)[:, None], other=0.0)
        v = tl.load(v_at, mask=(dim < D)[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    scores = tl.dot(q, k, input_precision="ieee") * scale  # [M, TILE], in powers of two
    if MASKED:
        scores = tl.where(position[None, :] <= query_at[:, None], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    shrink = tl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def _scan(
    q, k_cache, v_cache, table, start, seen_by_all, end, query_at, scale,
    BLOCK: tl.constexpr, BLOCK_STRIDE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Softmax of q [M, D] over the positions [start, end), of which each row sees those up to its
    query's own, `query_at` [M], and all rows see those before `seen_by_all`. Every row sees `start`.

    Returns the weighted sum of V (not yet divided), and each row's maximum and sum of weights.
    """
    acc = tl.zeros([M, D_PAD], tl.float32)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    whole = start + tl.maximum(seen_by_all - start, 0) // TILE * TILE
    # A tile's blocks are looked up while the one before it is computed. So the addresses of K and V
    # are known an iteration early, and the compiler can have `num_stages - 1` tiles in flight; looked
    # up in their own iteration they cost it two stages.
    block = _blocks(table, start, end, BLOCK, TILE)
    for at in range(start, whole, TILE):
        ahead = _blocks(table, at + TILE, end, BLOCK, TILE)
        acc, row_max, row_sum = _tile(
            q, k_cache, v_cache, block, at, end, query_at, acc, row_max, row_sum, scale,
            BLOCK, BLOCK_STRIDE, D, D_PAD, TILE, False,
        )  # fmt: skip
        block = ahead
    for at in range(whole, end, TILE):
        ahead = _blocks(table, at + TILE, end, BLOCK, TILE)
        acc, row_max, row_sum = _tile(
            q, k_cache, v_cache, block, at, end, query_at, acc, row_max, row_sum, scale,
            BLOCK, BLOCK_STRIDE, D, D_PAD, TILE, True,
        )  # fmt: skip
        block = ahead
    return acc, row_max, row_sum


# Numbers that differ from step to step are not compiled in: a compilation stops the engine for a second.
@triton.jit(do_not_specialize=["table_stride", "num_seqs"])
def _attend(
    q, k_cache, v_cache, out, tiles, query_start, context_lens, block_tables,
    table_stride, num_seqs, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: M // G queries of one sequence, the G heads of one group."""
    G: tl.constexpr = H // K
    QUERIES: tl.constexpr = M // G
    # The last tiles of a prompt have the longest contexts: they go first, the short ones fill up.
    at = tl.num_programs(0) - 1 - tl.program_id(0)
    seq = tl.load(tiles + 2 * at)
    if seq < num_seqs:
        head = tl.program_id(1)
        first = tl.load(tiles + 2 * at + 1)  # query of the sequence
        token = tl.load(query_start + seq)
        queries = tl.load(query_start + seq + 1) - token
        context = tl.load(context_lens + seq).to(tl.int32)
        row = tl.arange(0, M)
        # Rows beyond the last query repeat it: they see something, and are not stored.
        query = tl.minimum(first + row // G, queries - 1)
        inside = (row < QUERIES * G) & (first + row // G < queries)
        query_at = context - queries + query
        dim = tl.arange(0, D_PAD)
        places = ((token + query).to(tl.int64) * H + head * G + row % G) * D
        places = places[:, None] + dim[None, :]
        q_tile = tl.load(q + places, mask=(dim < D)[None, :], other=0.0)
        end = context - queries + tl.minimum(first + QUERIES, queries)
        BLOCK_STRIDE: tl.constexpr = K * BLOCK * D
        acc, _, row_sum = _scan(
            q_tile, k_cache + head * (BLOCK * D), v_cache + head * (BLOCK * D),
            block_tables + seq.to(tl.int64) * table_stride,
            0, context - queries + first + 1, end, query_at, scale,
            BLOCK, BLOCK_STRIDE, D, D_PAD, M, TILE,
        )  # fmt: skip
        result = acc / row_sum[:, None]
        mask = inside[:, None] & (dim < D)[None, :]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _share(context, splits, TILE: tl.constexpr, MIN_POSITIONS: tl.constexpr):
    """(positions of a split, splits that have any) of a context, of which there are `splits` at most."""
    wanted = tl.minimum(tl.cdiv(context, MIN_POSITIONS), splits)
    positions = tl.cdiv(tl.cdiv(context, wanted), TILE) * TILE
    return positions, tl.cdiv(context, positions)


@triton.jit(do_not_specialize=["table_stride", "splits"])
def _attend_decode(
    q, k_cache, v_cache, out, parts, part_lse, context_lens, block_tables,
    table_stride, splits, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr, MIN_POSITIONS: tl.constexpr,
):  # fmt: skip
    """One program: one split of one sequence's context, the G heads of one group."""
    G: tl.constexpr = H // K
    head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_lens + seq).to(tl.int32)
    positions, used = _share(context, splits, TILE, MIN_POSITIONS)
    if split < used:
        start = split * positions
        end = tl.minimum(start + positions, context)
        row = tl.arange(0, M)
        dim = tl.arange(0, D_PAD)
        group = head * G + tl.minimum(row, G - 1)
        inside = (row < G)[:, None] & (dim < D)[None, :]
        places = (seq.to(tl.int64) * H + group)[:, None] * D + dim[None, :]
        q_tile = tl.load(q + places, mask=(dim < D)[None, :], other=0.0)
        query_at = tl.zeros([M], tl.int32) + context - 1
        BLOCK_STRIDE: tl.constexpr = K * BLOCK * D
        acc, row_max, row_sum = _scan(
            q_tile, k_cache + head * (BLOCK * D), v_cache + head * (BLOCK * D),
            block_tables + seq.to(tl.int64) * table_stride, start, end, end, query_at, scale,
            BLOCK, BLOCK_STRIDE, D, D_PAD, M, TILE,
        )  # fmt: skip
        result = acc / row_sum[:, None]
        if used == 1:
            tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)
        else:
            part = (seq.to(tl.int64) * H + group) * splits + split  # [M]
            tl.store(parts + part[:, None] * D + dim[None, :], result, mask=inside)
            tl.store(part_lse + part, row_max + tl.log2(row_sum), mask=row < G)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    parts, part_lse, out, context_lens, splits,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
    MAX_SPLITS: tl.constexpr, MIN_POSITIONS: tl.constexpr,
):  # fmt: skip
    """One program: the splits of one sequence and head, weighed by their sums."""
    head, seq = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + seq).to(tl.int32)
    _, used = _share(context, splits, TILE, MIN_POSITIONS)
    if used > 1:
        split = tl.arange(0, MAX_SPLITS)
        dim = tl.arange(0, D_PAD)
        part = (seq.to(tl.int64) * H + head) * splits + split
        lse = tl.load(part_lse + part, mask=split < used, other=float("-inf"))
        weights = tl.exp2(lse - tl.max(lse, 0))
        mask = (split < used)[:, None] & (dim < D)[None, :]
        values = tl.load(parts + part[:, None] * D + dim[None, :], mask=mask, other=0.0)
        result = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
        place = (seq.to(tl.int64) * H + head) * D + dim
        tl.store(out + place, result.to(out.dtype.element_ty), mask=dim < D)


def query_tiles(query_start: Tensor, num_tokens: int, queries: int) -> Tensor:
    """Which queries each program of `attend` takes: [tiles, 2] int32, (sequence, first query).

    `queries` is what one tile holds. Made on the device without waiting for it, so there are as many
    tiles as there could be; those without work name a sequence that does not exist.
    """
    num_seqs = query_start.shape[0] - 1
    counts = (query_start.diff() + queries - 1) // queries
    ends = counts.cumsum(0)
    tile = torch.arange(num_tokens // queries + num_seqs, device=query_start.device)
    seq = torch.searchsorted(ends, tile, right=True)
    known = seq.clamp(max=num_seqs - 1)
    first = (tile - (ends - counts)[known]) * queries
    return torch.stack((seq, first), 1).int()


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    config: Tile,
    out: Tensor,
) -> None:
    """Causal attention, `out` [T, H, D], of q [T, H, D] over each sequence's context, own tokens included.

    k_cache, v_cache [blocks, K, block size, D]; query_start [S + 1]; context_lens [S];
    block_tables [S, B] int32; tiles from `query_tiles`. All contiguous, D even.
    """
    _, heads, dim = q.shape
    _, kv_heads, block, _ = k_cache.shape
    _attend[(tiles.shape[0], kv_heads)](
        q, k_cache, v_cache, out, tiles, query_start, context_lens, block_tables,
        block_tables.stride(0), context_lens.shape[0], LOG2E / dim**0.5,
        H=heads, K=kv_heads, D=dim, D_PAD=triton.next_power_of_2(dim), BLOCK=block,
        M=config.rows, TILE=config.keys, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def attend_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    config: Tile,
    splits: int,
    out: Tensor,
) -> None:
    """As `attend`, for one query a sequence: q and `out` [S, H, D]. `splits` is the most that a
    context is cut into; a short one is cut into fewer, down to none."""
    seqs, heads, dim = q.shape
    _, kv_heads, block, _ = k_cache.shape
    dim_pad = triton.next_power_of_2(dim)
    parts = torch.empty((seqs, heads, splits, dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((seqs, heads, splits), dtype=torch.float32, device=q.device)
    _attend_decode[(kv_heads, seqs, splits)](
        q, k_cache, v_cache, out, parts, part_lse, context_lens, block_tables,
        block_tables.stride(0), splits, LOG2E / dim**0.5,
        H=heads, K=kv_heads, D=dim, D_PAD=dim_pad, BLOCK=block, M=config.rows, TILE=config.keys,
        MIN_POSITIONS=MIN_SPLIT, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if splits > 1:
        _merge[(heads, seqs)](
            parts, part_lse, out, context_lens, splits,
            H=heads, D=dim, D_PAD=dim_pad, TILE=config.keys, MAX_SPLITS=MAX_SPLITS,
            MIN_POSITIONS=MIN_SPLIT, num_warps=4,
        )  # fmt: skip


def num_splits(seqs: int, kv_heads: int, programs: int) -> int:
    """The most splits with which all programs of a decode run at once, of the `programs` that fit."""
    return max(1, min(MAX_SPLITS, programs // (seqs * kv_heads)))


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
) -> Tensor:
    """What `attend` and `attend_decode` compute, one sequence at a time, in float32."""
    out = torch.empty_like(q)
    group, block = q.shape[1] // k_cache.shape[1], k_cache.shape[2]
    starts = query_start.tolist()
    for seq, context in enumerate(context_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        position = torch.arange(context, device=q.device)
        where = block_tables[seq].long()[position // block]
        k = k_cache[where, :, position % block].float().repeat_interleave(group, 1)  # [L, H, D]
        v = v_cache[where, :, position % block].float().repeat_interleave(group, 1)
        own = position[context - (rows.stop - rows.start) :]
        scores = torch.einsum("qhd,lhd->hql", q[rows].float(), k) / q.shape[2] ** 0.5
        scores = scores.masked_fill(position > own[:, None], float("-inf"))
        out[rows] = torch.einsum("hql,lhd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out
