"""Attention of queries in groups that read the same blocks. The rules are in pointwise.py.

The keys of a context are read in segments of KEYS, in order. Each segment takes two products and a
softmax that goes on where the segment before it ended (online softmax, arXiv:1805.02867), always in
the same order. A query therefore gets the same bits alone, with others, in chunks, and where others
read a prefix with it. Products are in float32 or, with a KV cache in bfloat16, in pairs.
"""

from typing import NamedTuple

import numpy as np

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.llvm.vectors import SEGMENT, copy_words, weigh_rows
from nanovllm.backends.cpu.kernels.parallel import in_parts
from nanovllm.backends.cpu.kernels.primitives import array, bytes_of, f32, from_float32
from nanovllm.backends.cpu.kernels.simd import WIDTH, add_narrow, add_product
from nanovllm.backends.cpu.kernels.words import TILE, is_tiled, operand, operands, per_word

KEYS = SEGMENT  # keys of a segment: every context is split at multiples of it
# The largest number of rows of a group of several queries.
MAX_ROWS = 64
# Up to so many rows of a group read the cache where it is.
FEW_ROWS = 8
AHEAD = 2  # tiles between those that are used and those that are prefetched


class QueryGroups(NamedTuple):
    """P groups of up to M queries that read the same blocks, each up to its own context length.

    Each K and V is read once per group. A group of three tokens of one sequence, with B = 4:

        block table   |       7       |       3       |       9       |
        tokens        | 0   1   2   3 | 4   5   6   7 | 8   9         |  context_lens
        query 20      | x   x   x   x | x   x   x   x |               |        8
        query 21      | x   x   x   x | x   x   x   x | x             |        9
        query 22      | x   x   x   x | x   x   x   x | x   x         |       10

    The group begins with its token of `first_tokens`, up to which another pass has computed its
    queries, or later: in a layer with a window, with the segment of the first key that one of them
    sees.
    """

    # [P, M] int64, indices of the step's tokens, padded with -1. M * G <= MAX_ROWS, or M = 1.
    queries: np.ndarray
    context_lens: np.ndarray  # [P, M] int64, ascending and at least 1
    first_tokens: np.ndarray  # [P] int64, multiples of KEYS
    block_tables: np.ndarray  # [P, blocks] int32


class AttentionWork(NamedTuple):
    """Two passes: prefixes that several sequences share, then the rest of their contexts."""

    positions: np.ndarray  # [T] int64, of the step's tokens in their contexts
    slot_mapping: np.ndarray  # [T] int64, where their keys and values are stored
    prefixes: QueryGroups
    rest: QueryGroups
    # [T, H, D + 2] float32, or empty without prefixes: the weighted sum of values, the maximum of
    # the scores and the sum of the weights after the prefix of a token that has one.
    partial: np.ndarray


@compiled()
def find_tiles(tiles, table, last, block_bytes, tiles_of_block, tile_bytes):
    """Set tiles [n] to where a head's tiles of a sequence are in the cache.

    The tile `last` stands for those after it, which a table may not have.
    """
    block, part, offset = 0, tiles_of_block, np.int64(0)
    for i in range(len(tiles)):
        if i <= last:
            if part == tiles_of_block:
                offset, part = np.int64(table[block]) * block_bytes, 0
                block += 1
            else:
                offset += tile_bytes
            part += 1
        tiles[i] = offset


@compiled()
def to_later_tile(tiles, i, h, heads, head_bytes):
    """Return the bytes from tile i of head h to a tile that is read soon: head by head, then i."""
    later = i * heads + h + AHEAD
    return tiles[later // heads] - tiles[i] + (later % heads - h) * head_bytes


@compiled()
def q_head(first_head, r, rows, q_per_kv):
    """Return the query head of row r of KV heads that have `rows` rows each."""
    return (first_head + r // rows) * q_per_kv + r % rows % q_per_kv


@compiled()
def copy_tokens(keys, values, k_cache, v_cache, table, tiles, head, first, tokens):
    """Copy tokens of a head to keys [D / n, KEYS, n] and values [KEYS / n, D or more, n].

    The token after the last one is 0 in values, because it may be NaN, and 0 times NaN is NaN.
    """
    _, _, block_size, dim = k_cache.shape
    words, _, n = keys.shape
    example = k_cache[0, 0, 0, 0]
    wide = values.shape[1]
    if is_tiled(block_size, dim):
        row_bytes = dim * k_cache.itemsize
        tile_bytes = TILE * row_bytes
        offset = head * block_size * row_bytes
        for j in range(0, tokens, TILE):
            place = offset + tiles[(first + j) // TILE]
            copy_words(np.int64(k_cache.ctypes.data) + place, tile_bytes // words,
                       np.int64(keys[:, j:].ctypes.data), 4 * KEYS, words, TILE, example)
            copy_words(np.int64(v_cache.ctypes.data) + place, n * tile_bytes // TILE,
                       np.int64(values[j // n].ctypes.data), 4 * wide, TILE // n, dim, example)
    else:
        for j in range(tokens):
            block, slot = table[(first + j) // block_size], (first + j) % block_size
            for d in range(dim):
                keys[d // n, j, d % n] = operand(k_cache[block, head, slot, d], example)
                values[j // n, d, j % n] = operand(v_cache[block, head, slot, d], example)
    if tokens % n > 0:
        values[tokens // n, :, 1] = 0


@compiled()
def add_values(word, sums_ptr, sums_stride, weights_ptr, weights_stride, v_ptr, v_stride, steps,
               rows, distance, dim):
    """Compute sums [rows, dim] += weights [rows, steps] times values [steps, dim], in words."""
    size = bytes_of(word) * per_word(word)  # bytes of a word
    whole = dim // WIDTH * WIDTH
    for c in range(0, whole, WIDTH):
        add_product(word, sums_ptr + 4 * c, sums_stride, weights_ptr, weights_stride,
                    v_ptr + size * c, v_stride, steps, rows, distance)
    for c in range(whole, dim, TILE):
        add_narrow(word, sums_ptr + 4 * c, sums_stride, weights_ptr, weights_stride,
                   v_ptr + size * c, v_stride, steps, rows, distance)


@compiled()
def attend_groups(qkv, out, partial, k_cache, v_cache, positions, queries, context_lens,
                  first_tokens, block_tables, is_prefix, window, v_scale, start, stop):
    """Compute attention for items [start, stop) of the P * K pairs of a group and a KV head.

    A query sees the last `window` tokens up to itself, or all if it is 0. A segment that a row does
    not see changes nothing in it: its maximum remains minus infinity, and its sums 0.

    qkv [T, H + 2K, D] and out [T, H, D] may have more rows. The prefix pass writes `partial`, and
    the other pass goes on from there and writes `out`. For R rows, the queries of a group times the
    G heads of a KV head:

        scores [R, KEYS] = q k^T
        weights [R, KEYS] = exp(scores - maximum)
        sums [R, D] = sums * exp(old maximum - maximum) + weights v

    Few rows read the tiles of the cache where they are. For many rows a segment is first copied, so
    that its tiles are side by side, and sums stay in registers longer. As 0 times infinity is NaN,
    an infinity in V can make NaN in all rows of the group.
    """
    _, num_kv_heads, block_size, dim = k_cache.shape
    q_per_kv = out.shape[1] // num_kv_heads
    log2_scale = f32(1.44269504) / np.sqrt(f32(dim))  # exp(x) is computed as 2^(x / ln 2)
    example, q_example = k_cache[0, 0, 0, 0], qkv[0, 0, 0]
    n = per_word(example)
    tiled = is_tiled(block_size, dim)
    words = dim // n
    wide = (dim + WIDTH - 1) // WIDTH * WIDTH
    max_rows = queries.shape[1] * q_per_kv
    tile_bytes = TILE * dim * bytes_of(example)
    head_bytes = block_size * dim * bytes_of(example)
    # Few rows of all heads are computed together, to read the cache in the order of memory.
    max_height = max(max_rows, FEW_ROWS * num_kv_heads)
    query = operands((max_height, dim), example)
    weights = operands((max_height, KEYS), example)
    scores = np.empty((max_height, KEYS), f32)
    sums = np.empty((max_height, wide), f32)
    oldest, visible = np.empty((2, max_height), np.int64)
    row_max, row_sum, factors = np.empty((3, max_height), f32)
    keys, values = operands((words, KEYS, n), example), operands((KEYS // n, wide, n), example)
    word = keys[0, 0, 0]
    odd_value = operands((wide, n), example)
    odd_value[:] = 0
    tiles = np.empty(block_tables.shape[1] * block_size // TILE + AHEAD + 1, np.int64)
    item = start
    while item < stop:
        p = item // num_kv_heads
        first_head = item % num_kv_heads
        count = np.sum(queries[p] >= 0)
        rows = count * q_per_kv
        context_len = context_lens[p, count - 1]
        goes_on = first_tokens[p] > 0
        is_few = tiled and rows <= FEW_ROWS
        heads = min(num_kv_heads - first_head, stop - item) if is_few else 1
        item += heads
        height = heads * rows
        if tiled:
            last_tile = (context_len - 1) // TILE
            find_tiles(tiles[: last_tile + AHEAD + 1], block_tables[p], last_tile,
                       num_kv_heads * head_bytes, block_size // TILE, tile_bytes)
        k_base = np.int64(k_cache.ctypes.data) + first_head * head_bytes
        v_base = np.int64(v_cache.ctypes.data) + first_head * head_bytes
        query_ptr, scores_ptr = np.int64(query.ctypes.data), np.int64(scores.ctypes.data)
        weights_ptr, sums_ptr = np.int64(weights.ctypes.data), np.int64(sums.ctypes.data)
        for r in range(height):
            token = queries[p, r % rows // q_per_kv]
            h = q_head(first_head, r, rows, q_per_kv)
            for d in range(dim):
                query[r, d] = operand(qkv[token, h, d], example)
            visible[r] = context_lens[p, r % rows // q_per_kv]
            oldest[r] = max(0, positions[token] + 1 - window) if window > 0 else 0
            row_max[r], row_sum[r] = -np.inf, 0
            sums[r] = 0
            if goes_on:
                row_max[r], row_sum[r] = partial[token, h, dim], partial[token, h, dim + 1]
                for d in range(dim):
                    sums[r, d] = partial[token, h, d]

        begin = max(first_tokens[p], np.min(oldest[:height]) // KEYS * KEYS)
        for first in range(begin, context_len, KEYS):
            tokens = min(KEYS, context_len - first)
            first_tile, stop_tile = first // TILE, (first + tokens - 1) // TILE + 1
            scores[:height] = 0
            if is_few:
                for i in range(first_tile, stop_tile):
                    for h in range(heads):
                        x = query_ptr + 4 * words * rows * h
                        out_ptr = scores_ptr + 4 * (KEYS * rows * h + TILE * (i - first_tile))
                        add_narrow(example, out_ptr, 4 * KEYS, x, 4 * words,
                                   k_base + tiles[i] + head_bytes * h, tile_bytes // words, words,
                                   rows, to_later_tile(tiles, i, h, heads, head_bytes))
            else:
                copy_tokens(keys, values, k_cache, v_cache, block_tables[p], tiles, first_head,
                            first, tokens)
                for c in range(0, tokens, WIDTH):
                    add_product(word, scores_ptr + 4 * c, 4 * KEYS, query_ptr, 4 * words,
                                np.int64(keys[:, c:].ctypes.data), 4 * KEYS, words, rows, 0)

            weigh_rows(height, scores_ptr, weights_ptr, np.int64(oldest.ctypes.data),
                       np.int64(visible.ctypes.data), first, np.int64(row_max.ctypes.data),
                       np.int64(row_sum.ctypes.data), np.int64(factors.ctypes.data), log2_scale,
                       word)
            for r in range(height):
                if factors[r] != 1:
                    for d in range(wide):
                        sums[r, d] *= factors[r]

            if not is_few:
                add_values(word, sums_ptr, 4 * wide, weights_ptr, 4 * KEYS // n,
                           np.int64(values.ctypes.data), 4 * wide, (tokens + n - 1) // n, rows, 0,
                           wide)
                continue
            stride = n * tile_bytes // TILE
            for i in range(first_tile, stop_tile):
                j = TILE * (i - first_tile)
                steps = min(TILE, tokens - j) // n
                for h in range(heads):
                    add_values(example, sums_ptr + 4 * wide * rows * h, 4 * wide,
                               weights_ptr + 4 * (KEYS * rows * h + j) // n, 4 * KEYS // n,
                               v_base + tiles[i] + head_bytes * h, stride, steps, rows,
                               to_later_tile(tiles, i, h, heads, head_bytes), dim)
            for h in range(heads if tokens % n > 0 else 0):
                # The slot after the last token may hold NaN, and 0 times NaN is NaN.
                address = v_base + tiles[stop_tile - 1] + head_bytes * h + stride * steps
                last = array(address, (dim, n), example)
                for d in range(dim):
                    odd_value[d, 0] = operand(last[d, 0], example)
                add_values(word, sums_ptr + 4 * wide * rows * h, 4 * wide,
                           weights_ptr + 4 * ((KEYS * rows * h + tokens) // n), 4 * KEYS // n,
                           np.int64(odd_value.ctypes.data), 0, 1, rows, 0, dim)

        for r in range(height):
            token = queries[p, r % rows // q_per_kv]
            h = q_head(first_head, r, rows, q_per_kv)
            if is_prefix:
                partial[token, h, dim], partial[token, h, dim + 1] = row_max[r], row_sum[r]
                for d in range(dim):
                    partial[token, h, d] = sums[r, d]
            else:
                factor = f32(v_scale) / row_sum[r]
                for d in range(dim):
                    out[token, h, d] = from_float32(sums[r, d] * factor, q_example)


@compiled()
def attend(qkv_ptr, rows, row_heads, out_ptr, num_heads, k_ptr, v_ptr, shape, work, window,
           v_scale, example, cache_example, attend_groups_at, parts):
    """Compute the AttentionWork `work`: qkv [rows, row_heads, D] -> out [rows, H, D].

    attend_groups_at is the address of attend_groups.
    """
    _, num_kv_heads, _, dim = shape
    qkv = array(qkv_ptr, (rows, row_heads, dim), example)
    out = array(out_ptr, (rows, num_heads, dim), example)
    k_cache, v_cache = array(k_ptr, shape, cache_example), array(v_ptr, shape, cache_example)
    for is_prefix in (True, False):
        queries, context_lens, first, block_tables = work.prefixes if is_prefix else work.rest
        if len(queries) > 0:
            arguments = (qkv, out, work.partial, k_cache, v_cache, work.positions, queries,
                         context_lens, first, block_tables, is_prefix, window, v_scale)
            in_parts(attend_groups_at, arguments, num_kv_heads * len(queries), parts)
