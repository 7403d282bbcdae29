"""Attention of queries in groups that read the same blocks. The rules are in pointwise.py.

The keys of a context are read in segments of KEYS, in order. Each segment takes two products and a
softmax that goes on where the segment before it ended (online softmax, arXiv:1805.02867), always in
the same order. A query therefore gets the same bits alone, with others, in chunks, and where others
read a prefix with it. Products are in float32 or, with a KV cache in bfloat16, in pairs.
"""

from typing import NamedTuple

import numpy as np

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.blocks import WIDTH, add_product
from nanovllm.backends.cpu.kernels.llvm.vectors import LANES, join_rows, transpose_rows, weigh_rows
from nanovllm.backends.cpu.kernels.parallel import in_parts
from nanovllm.backends.cpu.kernels.primitives import (
    array,
    bytes_of,
    f32,
    from_float32,
)
from nanovllm.backends.cpu.kernels.words import (
    factor_array,
    joined,
    stored_word,
    word,
    word_array,
)

KEYS = WIDTH  # of a segment: the scores of a segment are a block of the product
# The largest number of rows of a group of several queries.
MAX_ROWS = 64


class QueryGroups(NamedTuple):
    """P groups of up to M queries that read the same blocks, each up to its own context length.

    Each K and V is read once per group. A group of three tokens of one sequence, with B = 4:

        block table   |       7       |       3       |       9       |
        tokens        | 0   1   2   3 | 4   5   6   7 | 8   9         |  context_lens
        query 20      | x   x   x   x | x   x   x   x |               |        8
        query 21      | x   x   x   x | x   x   x   x | x             |        9
        query 22      | x   x   x   x | x   x   x   x | x   x         |       10

    The group begins with the token `first`, up to which another pass has computed its queries.
    """

    # [P, M] int64, indices of the step's tokens, padded with -1. M * G <= MAX_ROWS, or M = 1.
    queries: np.ndarray
    context_lens: np.ndarray  # [P, M] int64, ascending and at least 1
    first: np.ndarray  # [P] int64, a multiple of KEYS
    block_tables: np.ndarray  # [P, blocks] int32


class AttentionWork(NamedTuple):
    """Two passes: prefixes that several sequences share, then the rest of their contexts."""

    prefixes: QueryGroups
    rest: QueryGroups
    # [T, H, D + 2] float32, or empty without prefixes: the weighted sum of values, the maximum of
    # the scores and the sum of the weights after the prefix. The maximum is minus infinity without.
    partial: np.ndarray


@compiled()
def find_rows(offsets, table, last, block_rows, block_size, row_bytes):
    """Set offsets [n] to where the rows of a sequence's tokens are in the cache of a head.

    A block has `block_rows` rows of all heads. The token `last` stands for those after it.
    """
    block, slot, offset = 0, block_size, np.int64(0)
    for token in range(len(offsets)):
        if token <= last:
            if slot == block_size:
                offset, slot = np.int64(table[block]) * block_rows * row_bytes, 0
                block += 1
            else:
                offset += row_bytes
            slot += 1
        offsets[token] = offset


@compiled(no_nan=True)
def attend_groups(qkv, out, partial, k_cache, v_cache, queries, context_lens, first_tokens,
                  block_tables, is_prefix, v_scale, start, stop):
    """Compute attention for items [start, stop) of the P * K pairs of a group and a KV head.

    qkv [T, H + 2K, D] and out [T, H, D] may have more rows. The prefix pass writes `partial`, and
    the other pass goes on from there and writes `out`. For R rows, the queries of a group times the
    G heads of a KV head:

        scores [R, KEYS] = q k^T                    k is transposed as it is read
        weights [R, KEYS] = exp(scores - maximum)
        sums [R, D] = sums * exp(old maximum - maximum) + weights v

    As 0 times infinity is NaN, an infinity in V can make NaN in all rows of the group.
    """
    _, num_kv_heads, block_size, dim = k_cache.shape
    q_per_kv = out.shape[1] // num_kv_heads
    log2_scale = f32(1.44269504) / np.sqrt(f32(dim))  # exp(x) is computed as 2^(x / ln 2)
    example, q_example = k_cache[0, 0, 0, 0], qkv[0, 0, 0]
    stored, q_stored = stored_word(example, example), stored_word(q_example, example)
    per_word = bytes_of(stored) // bytes_of(example)
    words, whole = dim // per_word, dim // LANES * LANES
    wide = (dim + WIDTH - 1) // WIDTH * WIDTH
    max_rows, row_bytes = queries.shape[1] * q_per_kv, dim * bytes_of(example)
    query, keys = word_array((max_rows, words), example), word_array((words, KEYS), example)
    values = word_array((KEYS // per_word, wide), example)
    scores, sums = np.empty((max_rows, KEYS), f32), np.empty((max_rows, wide), f32)
    weights = factor_array((max_rows, KEYS), example)
    row_max, row_sum = np.empty(max_rows, f32), np.empty(max_rows, f32)
    factors = np.empty(max_rows, f32)
    visible = np.empty(max_rows, np.int64)
    max_keys = (block_tables.shape[1] * block_size + KEYS - 1) // KEYS * KEYS
    offsets, group = np.empty(max_keys + KEYS, np.int64), -1
    for item in range(start, stop):
        p, head = item // num_kv_heads, item % num_kv_heads
        count = np.sum(queries[p] >= 0)
        rows, context_len, begin = count * q_per_kv, context_lens[p, count - 1], first_tokens[p]
        if p != group:
            group, num_keys = p, (context_len + KEYS - 1) // KEYS * KEYS
            find_rows(offsets[: num_keys + KEYS], block_tables[p], context_len - 1,
                      num_kv_heads * block_size, block_size, row_bytes)
        head_bytes = head * block_size * row_bytes
        k_base = np.int64(k_cache.ctypes.data) + head_bytes
        v_base = np.int64(v_cache.ctypes.data) + head_bytes
        scores_ptr, weights_ptr = np.int64(scores.ctypes.data), np.int64(weights.ctypes.data)
        sums_ptr = np.int64(sums.ctypes.data)
        for r in range(rows):
            token, h = queries[p, r // q_per_kv], head * q_per_kv + r % q_per_kv
            q = array(qkv[token, h].ctypes.data, (words,), q_stored)
            for d in range(words):
                query[r, d] = word(q[d])
            visible[r] = context_lens[p, r // q_per_kv]
            row_max[r], row_sum[r] = -np.inf, 0
            sums[r] = 0
            if begin > 0:
                row_max[r], row_sum[r] = partial[token, h, dim], partial[token, h, dim + 1]
                for d in range(dim):
                    sums[r, d] = partial[token, h, d]

        for first in range(begin, context_len, KEYS):
            tokens = min(KEYS, context_len - first)
            for j in range(0, tokens, LANES):
                rows_at = np.int64(offsets[first + j :].ctypes.data)
                for d in range(0, words - LANES + 1, LANES):
                    transpose_rows(k_base, rows_at, rows_at + 8 * KEYS, d,
                                   np.int64(keys[d, j:].ctypes.data), 4 * KEYS, stored)
            for j in range(tokens):
                k = array(k_base + offsets[first + j], (words,), stored)
                for d in range(words // LANES * LANES, words):
                    keys[d, j] = word(k[d])
            scores[:rows] = 0
            add_product(keys[0, 0], scores_ptr, 4 * KEYS, np.int64(query.ctypes.data), 4 * words,
                        np.int64(keys.ctypes.data), 4 * KEYS, words, rows, False)

            weigh_rows(rows, scores_ptr, weights_ptr, np.int64(visible.ctypes.data), first,
                       np.int64(row_max.ctypes.data), np.int64(row_sum.ctypes.data),
                       np.int64(factors.ctypes.data), log2_scale, stored)
            for r in range(rows):
                if factors[r] != 1:
                    for d in range(wide):
                        sums[r, d] *= factors[r]

            for j in range((tokens + per_word - 1) // per_word):
                # The last token stands for the slot after it, which may hold NaN: 0 times NaN is
                # NaN.
                at = first + per_word * j
                other, ahead = at + per_word - 1, at + KEYS
                join_rows(v_base + offsets[at], v_base + offsets[other], v_base + offsets[ahead],
                          v_base + offsets[ahead + per_word - 1], whole,
                          np.int64(values[j].ctypes.data), stored)
                for d in range(whole, dim):
                    a = array(v_base + offsets[at], (dim,), example)[d]
                    b = array(v_base + offsets[other], (dim,), example)[d]
                    values[j, d] = joined(a, b, example)
            for c in range(0, wide, WIDTH):
                add_product(keys[0, 0], sums_ptr + 4 * c, 4 * wide, weights_ptr,
                            weights.itemsize * KEYS, np.int64(values[0, c:].ctypes.data), 4 * wide,
                            (tokens + per_word - 1) // per_word, rows, False)

        for r in range(rows):
            token, h = queries[p, r // q_per_kv], head * q_per_kv + r % q_per_kv
            if is_prefix:
                partial[token, h, dim], partial[token, h, dim + 1] = row_max[r], row_sum[r]
                for d in range(dim):
                    partial[token, h, d] = sums[r, d]
            else:
                factor = f32(v_scale) / row_sum[r]
                for d in range(dim):
                    number = sums[r, d] * factor
                    out[token, h, d] = from_float32(number, q_example)


@compiled()
def attend(qkv_ptr, rows, row_heads, out_ptr, num_heads, k_ptr, v_ptr, shape, work, v_scale,
           example, cache_example, attend_groups_at, parts):
    """Compute the AttentionWork `work`: qkv [rows, row_heads, D] -> out [rows, H, D].

    attend_groups_at is the address of attend_groups.
    """
    num_kv_heads, dim = shape[1], shape[3]
    qkv = array(qkv_ptr, (rows, row_heads, dim), example)
    out = array(out_ptr, (rows, num_heads, dim), example)
    k_cache, v_cache = array(k_ptr, shape, cache_example), array(v_ptr, shape, cache_example)
    for is_prefix in (True, False):
        queries, context_lens, first, block_tables = work.prefixes if is_prefix else work.rest
        if len(queries) > 0:
            arguments = (qkv, out, work.partial, k_cache, v_cache, queries, context_lens, first,
                         block_tables, is_prefix, v_scale)
            in_parts(attend_groups_at, arguments, num_kv_heads * len(queries), parts)
