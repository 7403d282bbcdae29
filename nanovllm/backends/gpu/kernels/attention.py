"""Paged attention: queries of any length attend to keys and values that are scattered over blocks.

The cache and the block tables have the layout of PagedAttention (arXiv:2309.06180). Two launches
share one inner loop, `_attend_range`, which walks over the context in tiles and keeps the running
maximum and sum of an online softmax (arXiv:1805.02867, algorithm 3):

- `attend` takes any mix of query lengths. As in FlashAttention-2 (arXiv:2307.08691), one program
  computes one tile of a sequence's queries.
- `attend_decode` takes one query per sequence. Few such queries do not fill a GPU, so each context
  is split among several programs (flash decoding, Dao et al. 2023) and `_merge_splits` merges them.

With grouped-query attention (GQA, arXiv:2305.13245) the G = H / K query heads of a group read the
same KV head. They are the rows of one tile, so K and V are loaded once per group. This also leaves
less padding in the matrix units, which take at least 16 rows. A tile with G = 2:

    rows of the tile      keys by position; their block is block_table[position // block size]
    query 0, head 0   [ x x x x x . . . | . . . . . . . . ]   x: position <= the query's position
    query 0, head 1   [ x x x x x . . . | . . . . . . . . ]
    query 1, head 0   [ x x x x x x . . | . . . . . . . . ]   A tile with only x needs no mask.
    query 1, head 1   [ x x x x x x . . | . . . . . . . . ]   A tile with only . is not loaded.

The tiles of a ragged batch; each has M = 8 rows and therefore 4 queries:

    query_start_loc                   [ 0             6       9   10 ]
    queries of each sequence            0 1 2 3 4 5 | 0 1 2 | 0
    tiles: (sequence, first query)      (0,0)   (0,4) (1,0)   (2,0)

The splits of a context in flash decoding, and their merge:

    positions            [ 0 ... s | s ... 2s | 2s ... context_len ]     s: a multiple of TILE
    split i computes       o_0       o_1        o_2        o_i: the softmax over its keys times V
                           l_0       l_1        l_2        l_i: log2 of the sum of 2^score
    merge                out = sum(w_i o_i) / sum(w_i),  w_i = 2^(l_i - max(l))

In a layer with a window a query sees the last W tokens, itself included. Its program begins at the
tile of the first key that one of its queries sees, and masks every tile.

The cache of a layer is [blocks, K, block size, D], so the keys of a head and block are contiguous.
Slots that were never written may hold anything, including NaN; they are never loaded. A cache in
fp8 (models/fp8.py) is converted after the load, to float16 if q is bfloat16. Its scales are launch
arguments that Triton does not specialize on: K's scale is part of `scale`, and V's scale
multiplies the result.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.gpu.kernels.configs import Tile
from nanovllm.backends.gpu.kernels.conversions import fp8_to
from nanovllm.backends.gpu.kernels.launch import launch

LOG2E = 1.4426950408889634
# A split of fewer positions costs more than it saves.
MIN_SPLIT_SIZE = tl.constexpr(64)
MAX_SPLITS = tl.constexpr(64)


@triton.jit
def _load_blocks(block_table, start, end, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Physical blocks [TILE] of the positions from `start`; the null block at `end` and beyond."""
    position = start + tl.arange(0, TILE)
    return tl.load(block_table + position // BLOCK, mask=position < end, other=0)


@triton.jit
def _attend_tile(
    q, k_cache, v_cache, blocks, start, end, query_position, acc, row_max, row_sum, scale,
    K: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, LOOPS: tl.constexpr, WINDOW: tl.constexpr,
):
    """Update the online softmax with the keys at the positions [start, start + TILE)."""
    D_PAD: tl.constexpr = q.shape[1]
    dim = tl.arange(0, D_PAD)
    position = start + tl.arange(0, TILE)
    # The compiler removes a mask that is always true.
    in_head, in_range = (dim < D) | (D == D_PAD), (position < end) | (not MASKED)
    # Offsets are 64-bit, because caches of more than 2^31 elements are common.
    offset = blocks.to(tl.int64) * (K * BLOCK * D) + (position % BLOCK) * D
    k_ptrs = k_cache + offset[None, :] + dim[:, None]  # [D, TILE]
    k = tl.load(k_ptrs, mask=in_range[None, :] & in_head[:, None], other=0.0).to(q.dtype)
    v_ptrs = v_cache + offset[:, None] + dim[None, :]  # [TILE, D]
    v = tl.load(v_ptrs, mask=in_range[:, None] & in_head[None, :], other=0.0)
    # Triton 3.6 to 3.7.1 cannot compile the inline assembly of `fp8_to` in a loop of prompts for
    # the matrix units of sm_100, and it would not be faster there.
    v = fp8_to(v, q.dtype) if (LOOPS == 1) & (v.dtype == tl.float8e4nv) else v.to(q.dtype)
    # `scale` contains log2(e), so that exp2, which is one instruction, replaces exp below.
    scores = tl.dot(q, k, input_precision="ieee") * scale  # [M, TILE]
    if MASKED:
        scores = tl.where(position[None, :] <= query_position[:, None], scores, float("-inf"))
    if WINDOW:
        oldest = query_position + 1 - WINDOW
        scores = tl.where(position[None, :] >= oldest[:, None], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # The first tiles may have no key that a row sees. Its maximum is minus infinity then.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if WINDOW else new_max
    weights = tl.exp2(scores - shift[:, None])
    correction = tl.exp2(row_max - shift)
    row_sum = row_sum * correction + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def _attend_range(
    q, k_cache, v_cache, block_table, kv_head, start, unmasked_end, end, query_position, scale,
    v_scale, K: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    LOOPS: tl.constexpr, WINDOW: tl.constexpr,
):
    """Compute attention of q [M, D] over the positions [start, end) of one KV head.

    A row attends up to its `query_position` [M], at least to `start`, and to the last WINDOW
    positions only unless that is 0. All rows attend to every position before `unmasked_end`, which
    is `start` with a window. LOOPS is 2, or 1 if it is always `start`. Returns
    (the softmax times V [M, D], log2 of the sum of 2^score [M]).
    """
    if (k_cache.dtype.element_ty == tl.float8e4nv) & (q.dtype == tl.bfloat16):
        q = q.to(tl.float16)  # the GPU converts fp8 to it in one instruction
    k_cache += kv_head * (BLOCK * D)
    v_cache += kv_head * (BLOCK * D)
    acc = tl.zeros(q.shape, tl.float32)
    row_max = tl.full([q.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.zeros([q.shape[0]], tl.float32)
    masked_start = start + tl.maximum(unmasked_end - start, 0) // TILE * TILE
    # The blocks of a tile are looked up one iteration early, so that the loads of `num_stages - 1`
    # tiles can be in flight; a lookup in the same iteration would cost two of them.
    blocks = _load_blocks(block_table, start, end, BLOCK, TILE)
    # The compiler unrolls this loop: tiles that all rows attend to completely, then the others.
    for masked in tl.static_range(2 - LOOPS, 2):
        first, last = (masked_start, end) if masked else (start, masked_start)
        for tile_start in range(first, last, TILE):
            next_blocks = _load_blocks(block_table, tile_start + TILE, end, BLOCK, TILE)
            acc, row_max, row_sum = _attend_tile(
                q, k_cache, v_cache, blocks, tile_start, end, query_position, acc, row_max, row_sum,
                scale, K, BLOCK, D, TILE, masked, LOOPS, WINDOW,
            )
            blocks = next_blocks
    return acc / row_sum[:, None] * v_scale, row_max + tl.log2(row_sum)


@triton.jit
def _first_tile(visible, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first position of the tile with the first of the last WINDOW of `visible` positions."""
    return tl.maximum(visible - WINDOW, 0) // TILE * TILE if WINDOW else 0


# A compilation takes about a second. Triton must therefore not specialize on numbers that vary
# between steps, or on the alignment of tensors that may be slices.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tiles", "query_start_loc", "context_lens", "block_tables"],
)
def _attend(
    q, k_cache, v_cache, out, tiles, query_start_loc, context_lens, block_tables,
    table_stride, scale, v_scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, LOOPS: tl.constexpr, WINDOW: tl.constexpr,
):
    """One program computes M // G queries of one sequence for the G heads of one group."""
    G: tl.constexpr = H // K
    QUERIES: tl.constexpr = M // G
    # The last tiles of a prompt have the longest contexts. Starting them first balances the load.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    seq = tl.load(tiles + 2 * tile)
    kv_head = tl.program_id(1)
    first_query = tl.load(tiles + 2 * tile + 1)
    first_token = tl.load(query_start_loc + seq)
    num_queries = tl.load(query_start_loc + seq + 1) - first_token
    context_len = tl.load(context_lens + seq).to(tl.int32)
    row = tl.arange(0, M)
    # Rows past the last query repeat it, so that no row is without keys. They are not stored.
    query = tl.minimum(first_query + row // G, num_queries - 1)
    in_range = (row < QUERIES * G) & (first_query + row // G < num_queries)
    query_position = context_len - num_queries + query
    dim = tl.arange(0, triton.next_power_of_2(D))
    offsets = ((first_token + query).to(tl.int64) * H + kv_head * G + row % G) * D
    offsets = offsets[:, None] + dim[None, :]
    q_tile = tl.load(q + offsets, mask=(dim < D)[None, :], other=0.0)
    end = context_len - num_queries + tl.minimum(first_query + QUERIES, num_queries)
    visible = context_len - num_queries + first_query + 1  # to the first query of the tile
    start = _first_tile(visible, TILE, WINDOW)
    result, _ = _attend_range(
        q_tile, k_cache, v_cache, block_tables + seq.to(tl.int64) * table_stride, kv_head,
        start, start if WINDOW or LOOPS == 1 else visible, end, query_position,
        scale, v_scale, K, BLOCK, D, TILE, LOOPS, WINDOW,
    )
    mask = in_range[:, None] & (dim < D)[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _split_context(context_len, max_splits, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """(first position, positions of a split, number of splits).

    There are at most `max_splits`, none of them empty.
    """
    first = _first_tile(context_len, TILE, WINDOW)
    length = context_len - first
    wanted = tl.minimum(tl.cdiv(length, MIN_SPLIT_SIZE), max_splits)
    split_size = tl.cdiv(tl.cdiv(length, wanted), TILE) * TILE
    return first, split_size, tl.cdiv(length, split_size)


@triton.jit(
    do_not_specialize=["table_stride", "max_splits"],
    do_not_specialize_on_alignment=["order", "context_lens", "block_tables"],
)
def _attend_decode(
    q, k_cache, v_cache, out, split_out, split_lse, order, context_lens, block_tables,
    table_stride, max_splits, scale, v_scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr,
):
    """One program computes one split of a sequence's context for the G heads of one group.

    A second loop without masks would save little arithmetic, and its loads would have to wait until
    the loads of the first loop have drained.
    """
    G: tl.constexpr = H // K
    kv_head, split = tl.program_id(0), tl.program_id(1)
    seq = tl.load(order + tl.program_id(2))
    context_len = tl.load(context_lens + seq).to(tl.int32)
    first, split_size, num_splits = _split_context(context_len, max_splits, TILE, WINDOW)
    if split < num_splits:
        start = first + split * split_size
        end = tl.minimum(start + split_size, context_len)
        row = tl.arange(0, M)
        dim = tl.arange(0, triton.next_power_of_2(D))
        head = kv_head * G + tl.minimum(row, G - 1)
        mask = (row < G)[:, None] & (dim < D)[None, :]
        offsets = (seq * H + head)[:, None] * D + dim[None, :]
        q_tile = tl.load(q + offsets, mask=(dim < D)[None, :], other=0.0)
        query_position = tl.zeros([M], tl.int32) + context_len - 1
        result, lse = _attend_range(
            q_tile, k_cache, v_cache, block_tables + seq * table_stride, kv_head,
            start, start, end, query_position, scale, v_scale, K, BLOCK, D, TILE, 1, WINDOW,
        )
        if num_splits == 1:
            tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)
        else:
            index = (seq * H + head) * max_splits + split  # [M]
            tl.store(split_out + index[:, None] * D + dim[None, :], result, mask=mask)
            tl.store(split_lse + index, lse, mask=row < G)


@triton.jit(do_not_specialize=["max_splits"], do_not_specialize_on_alignment=["context_lens"])
def _merge_splits(
    split_out, split_lse, out, context_lens, max_splits,
    H: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
):
    """One program merges the splits of one sequence and query head."""
    head, seq = tl.program_id(0), tl.program_id(1)
    context_len = tl.load(context_lens + seq).to(tl.int32)
    _, _, num_splits = _split_context(context_len, max_splits, TILE, WINDOW)
    if num_splits > 1:
        split = tl.arange(0, MAX_SPLITS)
        dim = tl.arange(0, triton.next_power_of_2(D))
        index = (seq.to(tl.int64) * H + head) * max_splits + split
        lse = tl.load(split_lse + index, mask=split < num_splits, other=float("-inf"))
        weights = tl.exp2(lse - tl.max(lse, 0))
        mask = (split < num_splits)[:, None] & (dim < D)[None, :]
        values = tl.load(split_out + index[:, None] * D + dim[None, :], mask=mask, other=0.0)
        result = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
        offset = (seq.to(tl.int64) * H + head) * D + dim
        tl.store(out + offset, result.to(out.dtype.element_ty), mask=dim < D)


def query_tiles(query_lens: np.ndarray, queries_per_tile: int) -> np.ndarray:
    """Return the queries of each program of `attend`: [tiles, 2] int32, (sequence, first query)."""
    counts = -(-query_lens // queries_per_tile)
    seq = np.repeat(np.arange(len(counts)), counts)
    first_tile = np.cumsum(counts) - counts
    first_query = (np.arange(len(seq)) - first_tile[seq]) * queries_per_tile
    return np.stack((seq, first_query), 1).astype(np.int32)


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: Tensor, query_start_loc: Tensor,
    context_lens: Tensor, block_tables: Tensor, config: Tile, out: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0, window: int = 0, loops: int = 2,
) -> None:
    """Write causal attention of q [T, H, D] over each sequence's context to `out` [T, H, D].

    The queries are the last tokens of their context. k_cache, v_cache [blocks, K, block size, D];
    tiles from `query_tiles`; query_start_loc [S + 1] int32; context_lens [S]; block_tables [S, B]
    int32. All tensors are contiguous. The numbers in the caches are multiplied by the scales. A
    query sees the last `window` positions up to its own, or all if it is 0. With loops=1 every tile
    is masked, so that the result for a query does not depend on its tile.
    """
    _, H, D = q.shape
    _, K, BLOCK, _ = k_cache.shape
    args = (
        q, k_cache, v_cache, out, tiles, query_start_loc, context_lens, block_tables,
        block_tables.stride(0), LOG2E / D**0.5 * k_scale, v_scale,
    )
    sizes = dict(H=H, K=K, D=D, BLOCK=BLOCK, M=config.num_rows, TILE=config.num_keys)
    constants = sizes | dict(LOOPS=loops, WINDOW=window)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    launch(_attend, (tiles.shape[0], K, 1), args, constants, **options)


def attend_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, order: Tensor, context_lens: Tensor,
    block_tables: Tensor, config: Tile, max_splits: int, out: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0, window: int = 0,
) -> None:
    """Compute the same as `attend` for one query per sequence: q and `out` are [S, H, D].

    The sequences start in the order `order` [S] int64: if the longest come first, no long one is
    still computed when the others have ended. A context is split into at most `max_splits` parts,
    a short one into fewer or not at all.
    """
    S, H, D = q.shape
    _, K, BLOCK, _ = k_cache.shape
    split_out = torch.empty((S, H, max_splits, D), dtype=torch.float32, device=q.device)
    split_lse = torch.empty((S, H, max_splits), dtype=torch.float32, device=q.device)
    args = (
        q, k_cache, v_cache, out, split_out, split_lse, order, context_lens, block_tables,
        block_tables.stride(0), max_splits, LOG2E / D**0.5 * k_scale, v_scale,
    )
    sizes = dict(H=H, K=K, D=D, BLOCK=BLOCK, M=config.num_rows, TILE=config.num_keys)
    constants = sizes | dict(WINDOW=window)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    launch(_attend_decode, (K, max_splits, S), args, constants, **options)
    if max_splits > 1:
        merged = (split_out, split_lse, out, context_lens, max_splits)
        constants = dict(H=H, D=D, TILE=config.num_keys, WINDOW=window)
        launch(_merge_splits, (H, S, 1), merged, constants, num_warps=4)


def num_splits(num_seqs: int, num_kv_heads: int, num_resident: int) -> int:
    """Return the largest number of splits per context if `num_resident` programs run at a time.

    Twice as many may start, because contexts are not equally long and short ones have fewer splits.
    """
    return max(1, min(MAX_SPLITS.value, 2 * num_resident // (num_seqs * num_kv_heads)))
