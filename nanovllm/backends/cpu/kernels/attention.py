"""Attention of queries in groups that read the same blocks. The rules are in pointwise.py.

The rows of a group are its queries times the G heads of a KV head. A few rows, such as a decode's,
take as long as reading K and V. Many rows, such as a prompt's, are two matrix products, in float32
or, with AVX512-BF16 and a KV cache in bfloat16, in pairs of bfloat16.
"""

from typing import NamedTuple

import numpy as np

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.llvm.vectors import LANES, add_two, score_two
from nanovllm.backends.cpu.kernels.parallel import in_parts
from nanovllm.backends.cpu.kernels.primitives import (
    array,
    bytes_of,
    exp,
    f32,
    from_float32,
    maximum,
    to_float32,
)
from nanovllm.backends.cpu.kernels.words import (
    HEIGHT,
    WIDTH,
    joined,
    multiply,
    stored_word,
    total,
    word,
    word_array,
)

# Prefetch distance of KV, in tiles of a block: 28 layers of attention over 16 x 192 tokens take
# 20 ms instead of 27 ms.
PREFETCH_TILES = 2
# From so many rows of a group on (times the numbers of a word) its attention is two products.
MANY_ROWS = 16
# The largest number of rows of a group of several queries.
MAX_ROWS = 64
KEYS = 32  # keys of a product


class QueryGroups(NamedTuple):
    """P groups of up to M queries that read the same blocks, each up to its own context length.

    Each K and V is read once per group. A group of three tokens of one sequence, with B = 4:

        block table   |       7       |       3       |       9       |
        tokens        | 0   1   2   3 | 4   5   6   7 | 8   9         |  context_lens
        query 20      | x   x   x   x | x   x   x   x |               |        8
        query 21      | x   x   x   x | x   x   x   x | x             |        9
        query 22      | x   x   x   x | x   x   x   x | x   x         |       10
    """

    # [P, M] int64, indices of the step's tokens, padded with -1. M * G <= max_rows, or M = 1.
    queries: np.ndarray
    context_lens: np.ndarray  # [P, M] int64, ascending and at least 1
    block_tables: np.ndarray  # [P, blocks] int32


class AttentionWork(NamedTuple):
    """Two passes, merged as in flash decoding (arXiv:2311.01282): prefixes, then the rest."""

    prefixes: QueryGroups
    rest: QueryGroups
    # [T, H] float32, log-sum-exp of the scores of the prefix; minus infinity without a prefix.
    lse: np.ndarray


@compiled()
def kv_address(cache, block, head, slot):
    """Return the address of a token's K or V in cache [blocks, K, B, D]."""
    row = (np.int64(block) * cache.shape[1] + head) * cache.shape[2] + slot
    return np.int64(cache.ctypes.data) + row * cache.shape[3] * cache.itemsize


@compiled()
def count_queries(queries):
    count = 0
    while count < len(queries) and queries[count] >= 0:
        count += 1
    return count


@compiled()
def tile_addresses(cache, table, first_head, heads, tile, tiles):
    """Return the addresses of a tile (a head's tokens of a block) and of a later tile."""
    later = min(tile + PREFETCH_TILES, tiles - 1)
    here = kv_address(cache, table[tile // heads], first_head + tile % heads, 0)
    return here, kv_address(cache, table[later // heads], first_head + later % heads, 0)


@compiled()
def element_address(x, i, j):
    """Return the address of x[i, j] in an array of float32."""
    return np.int64(x.ctypes.data) + 4 * (i * x.shape[1] + j)


@compiled()
def attend_few(qkv, out, lse, k_cache, v_cache, queries, context_lens, block_tables, is_prefix,
                 start, stop):
    """Compute attend_groups for groups of few rows.

    All items of a group are computed together, to read the cache as it lies in memory: blocks, then
    heads, then tokens. An odd last row is paired with zeros.
    """
    _, num_kv_heads, block_size, dim = k_cache.shape
    q_per_kv, wide = out.shape[1] // num_kv_heads, (dim + LANES - 1) // LANES * LANES
    scale, example = f32(1) / np.sqrt(f32(dim)), k_cache[0, 0, 0, 0]
    item = start
    while item < stop:
        p, first_head = item // num_kv_heads, item % num_kv_heads
        heads = min(num_kv_heads - first_head, stop - item)
        item += heads
        table, count = block_tables[p], count_queries(queries[p])
        rows, context_len = count * q_per_kv, context_lens[p, count - 1]
        height, tiles = rows + rows % 2, (context_len + block_size - 1) // block_size * heads
        query, acc = np.zeros((heads * height, wide), f32), np.zeros((heads * height, wide), f32)
        weights = np.empty((heads * height, context_len), f32)  # the scores until the softmax
        row_sum = np.empty(heads * height, f32)
        for h in range(heads):
            for r in range(rows):
                q = qkv[queries[p, r // q_per_kv], (first_head + h) * q_per_kv + r % q_per_kv]
                for d in range(dim):
                    query[h * height + r, d] = to_float32(q[d]) * scale

        for tile in range(tiles):
            i, h = tile // heads, tile % heads
            keys, ahead = tile_addresses(k_cache, table, first_head, heads, tile, tiles)
            tokens = min(block_size, context_len - i * block_size)
            for r in range(h * height, (h + 1) * height, 2):
                scores = element_address(weights, r, i * block_size)
                score_two(element_address(query, r, 0), keys, ahead, tokens, dim, scores,
                          context_len, example)

        for h in range(heads):
            for r in range(rows):
                token = queries[p, r // q_per_kv]
                q_head = (first_head + h) * q_per_kv + r % q_per_kv
                row, visible = weights[h * height + r], context_lens[p, r // q_per_kv]
                prefix_lse = f32(-np.inf) if is_prefix else lse[token, q_head]
                row_max = max(prefix_lse, maximum(row[:visible]))
                prefix_sum = exp(prefix_lse - row_max) if prefix_lse > -np.inf else f32(0)
                total = prefix_sum
                for t in range(visible):
                    weight = exp(row[t] - row_max)
                    row[t] = weight
                    total += weight
                row[visible:] = 0
                row_sum[h * height + r] = total
                if prefix_sum > 0:
                    for d in range(dim):
                        acc[h * height + r, d] = prefix_sum * to_float32(out[token, q_head, d])
                if is_prefix:
                    lse[token, q_head] = row_max + np.log(total)

        for tile in range(tiles):
            i, h = tile // heads, tile % heads
            values, ahead = tile_addresses(v_cache, table, first_head, heads, tile, tiles)
            tokens = min(block_size, context_len - i * block_size)
            for r in range(h * height, (h + 1) * height, 2):
                add_two(element_address(weights, r, i * block_size), context_len, values, ahead,
                        tokens, dim, element_address(acc, r, 0), example)

        for h in range(heads):
            for r in range(rows):
                result = out[queries[p, r // q_per_kv], (first_head + h) * q_per_kv + r % q_per_kv]
                for d in range(dim):
                    number = acc[h * height + r, d] / row_sum[h * height + r]
                    result[d] = from_float32(number, qkv[0, 0, 0])


@compiled(no_nan=True)
def attend_groups(qkv, out, lse, k_cache, v_cache, queries, context_lens, block_tables, is_prefix,
                  start, stop):
    """Compute attention for items [start, stop) of the P * K pairs of a group and a KV head.

    qkv [T, H + 2K, D] and out [T, H, D] may have more rows; lse [T, H]. The prefix pass writes out
    and lse, and the other pass merges them into out. Of a group of many rows:

    scores = K q, for HEIGHT keys, in the layout of the cache, and WIDTH rows at a time. The queries
    are transposed:

            dims 0  1   2  3                row 0   row 1               row 0   1
        token 0 [ k  k | k  k |     dims 0, 1 [ q  q | q  q |       token 0 [ s | s |
        token 1 [ k  k | k  k |  x       2, 3 [ q  q | q  q |   =   token 1 [ s | s |

    The rows are therefore side by side in memory, and the softmax takes a vector of them at a time.

    out = w V, for HEIGHT rows and WIDTH dimensions at a time. In pairs, the tokens of V are
    interleaved, and the weights are rounded before they are summed:

         tokens 0  1   2  3                 dim 0   dim 1               dim 0   1
          row 0 [ w  w | w  w |   tokens 0, 1 [ v  v | v  v |         row 0 [ o | o |
          row 1 [ w  w | w  w |  x       2, 3 [ v  v | v  v |   =     row 1 [ o | o |

    As 0 times infinity is NaN, an infinity in V can make NaN in all rows of the group.
    """
    _, num_kv_heads, block_size, dim = k_cache.shape
    q_per_kv, scale = out.shape[1] // num_kv_heads, f32(1) / np.sqrt(f32(dim))
    example, q_example = k_cache[0, 0, 0, 0], qkv[0, 0, 0]
    stored, q_stored = stored_word(example, example), stored_word(q_example, example)
    per_word = bytes_of(stored) // bytes_of(example)
    if queries.shape[1] * q_per_kv * per_word < MANY_ROWS:
        attend_few(qkv, out, lse, k_cache, v_cache, queries, context_lens, block_tables, is_prefix,
                   start, stop)
        return
    words, wide = dim // per_word, (dim + WIDTH - 1) // WIDTH * WIDTH
    max_rows = (queries.shape[1] * q_per_kv + WIDTH - 1) // WIDTH * WIDTH
    max_keys = (block_tables.shape[1] * block_size + KEYS - 1) // KEYS * KEYS
    query = word_array((max_rows // WIDTH, words, WIDTH), example)
    keys, values = word_array((KEYS, words), example), word_array((KEYS // per_word, wide), example)
    scores, acc = np.empty((max_keys, max_rows), f32), np.zeros((max_rows, wide), f32)
    weights = word_array((max_keys // per_word, max_rows), example)
    visible = np.empty(max_rows, np.int32)
    row_max, row_sum = np.empty(max_rows, f32), np.empty(max_rows, f32)
    item = start
    while item < stop:
        p, head = item // num_kv_heads, item % num_kv_heads
        table, count = block_tables[p], count_queries(queries[p])
        rows, context_len = count * q_per_kv, context_lens[p, count - 1]
        if rows * per_word < MANY_ROWS:
            following = min(stop, item + num_kv_heads - head)
            attend_few(qkv, out, lse, k_cache, v_cache, queries, context_lens, block_tables,
                       is_prefix, item, following)
            item = following
            continue
        item += 1
        padded = (rows + WIDTH - 1) // WIDTH * WIDTH
        num_keys = (context_len + KEYS - 1) // KEYS * KEYS
        visible[:padded], row_max[:padded], row_sum[:padded] = 0, -np.inf, 0
        for r in range(rows):
            token, h = queries[p, r // q_per_kv], head * q_per_kv + r % q_per_kv
            q = array(qkv[token, h].ctypes.data, (words,), q_stored)
            for d in range(words):
                query[r // WIDTH, d, r % WIDTH] = word(q[d])
            visible[r] = context_lens[p, r // q_per_kv]
            if not is_prefix:
                row_max[r] = lse[token, h]

        for first in range(0, num_keys, KEYS):
            for j in range(KEYS):
                # The last token stands for the slots after it, which a table may not have.
                slot = min(first + j, context_len - 1)
                address = kv_address(k_cache, table[slot // block_size], head, slot % block_size)
                k = array(address, (words,), stored)
                for d in range(words):
                    keys[j, d] = word(k[d])
            scores[first : first + KEYS, :padded] = 0
            for r in range(0, padded, WIDTH):
                for j in range(0, KEYS, HEIGHT):
                    x = np.int64(keys[j:].ctypes.data), 4 * words, 4
                    to = np.int64(scores[first + j :, r:].ctypes.data), 4 * max_rows
                    w = np.int64(query[r // WIDTH].ctypes.data), 4 * WIDTH
                    multiply(x, w, words, to, example)

        for t in range(num_keys):
            for r in range(padded):
                score = scores[t, r] * scale if t < visible[r] else f32(-np.inf)
                row_max[r] = max(row_max[r], score)
        for r in range(rows):
            token, h = queries[p, r // q_per_kv], head * q_per_kv + r % q_per_kv
            if not is_prefix and lse[token, h] > -np.inf:
                row_sum[r] = exp(lse[token, h] - row_max[r])
            for d in range(dim):
                acc[r, d] = row_sum[r] * to_float32(out[token, h, d]) if row_sum[r] > 0 else f32(0)
        for t in range(num_keys // per_word):
            even, odd = per_word * t, per_word * t + per_word - 1
            for r in range(padded):
                a = exp(scores[even, r] * scale - row_max[r])
                b = exp(scores[odd, r] * scale - row_max[r])
                a, b = a if even < visible[r] else f32(0), b if odd < visible[r] else f32(0)
                weights[t, r] = joined(a, b, example)
                row_sum[r] += total(weights[t, r])

        for first in range(0, num_keys, KEYS):
            for j in range(KEYS // per_word):
                # Slots after the last token may hold NaN, and 0 times NaN is NaN.
                slot = min(first + per_word * j, context_len - 1)
                after = min(first + per_word * j + per_word - 1, context_len - 1)
                address = kv_address(v_cache, table[slot // block_size], head, slot % block_size)
                v = array(address, (dim,), example)
                address = kv_address(v_cache, table[after // block_size], head, after % block_size)
                next_v = array(address, (dim,), example)
                for d in range(dim):
                    values[j, d] = joined(v[d], next_v[d], example)
            for r in range(0, rows, HEIGHT):
                x = np.int64(weights[first // per_word :, r:].ctypes.data), 4, 4 * max_rows
                for d in range(0, wide, WIDTH):
                    w = np.int64(values[:, d:].ctypes.data), 4 * wide
                    to = np.int64(acc[r:, d:].ctypes.data), 4 * wide
                    multiply(x, w, KEYS // per_word, to, example)

        for r in range(rows):
            token, h = queries[p, r // q_per_kv], head * q_per_kv + r % q_per_kv
            if is_prefix:
                lse[token, h] = row_max[r] + np.log(row_sum[r])
            for d in range(dim):
                out[token, h, d] = from_float32(acc[r, d] / row_sum[r], q_example)


@compiled()
def attend(qkv_ptr, rows, row_heads, out_ptr, num_heads, k_ptr, v_ptr, shape, work, example,
           cache_example, attend_groups_at, parts):
    """Compute the AttentionWork `work`: qkv [rows, row_heads, D] -> out [rows, H, D].

    attend_groups_at is the address of a unit's attend_groups.
    """
    num_kv_heads, dim = shape[1], shape[3]
    qkv = array(qkv_ptr, (rows, row_heads, dim), example)
    out = array(out_ptr, (rows, num_heads, dim), example)
    k_cache, v_cache = array(k_ptr, shape, cache_example), array(v_ptr, shape, cache_example)
    for is_prefix in (True, False):
        queries, context_lens, block_tables = work.prefixes if is_prefix else work.rest
        if len(queries) > 0:
            arguments = (qkv, out, work.lse, k_cache, v_cache, queries, context_lens, block_tables,
                         is_prefix)
            in_parts(attend_groups_at, arguments, num_kv_heads * len(queries), parts)
