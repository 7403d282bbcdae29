"""Attention of groups of few rows, such as decodes, which take as long as reading K and V.

The rows of a group are its queries times the G heads of a KV head. The rules are in pointwise.py.
"""

from typing import NamedTuple

import numpy as np

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.llvm.vectors import add_two, score_two
from nanovllm.backends.cpu.kernels.primitives import (
    exp,
    f32,
    from_float32,
    maximum,
    to_float32,
)

# Prefetch distance of KV, in tiles of a block: 28 layers of attention over 16 x 192 tokens take
# 20 ms instead of 27 ms.
PREFETCH_TILES = 2


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
    """Compute attend_groups for groups of few rows. D is a multiple of 16.

    All items of a group are computed together, to read the cache as it lies in memory: blocks, then
    heads, then tokens. An odd last row is paired with zeros.
    """
    _, num_kv_heads, block_size, dim = k_cache.shape
    q_per_kv, scale = out.shape[1] // num_kv_heads, f32(1) / np.sqrt(f32(dim))
    example = k_cache[0, 0, 0, 0]
    item = start
    while item < stop:
        p, first_head = item // num_kv_heads, item % num_kv_heads
        heads = min(num_kv_heads - first_head, stop - item)
        item += heads
        table, count = block_tables[p], np.sum(queries[p] >= 0)
        rows, context_len = count * q_per_kv, context_lens[p, count - 1]
        height, tiles = rows + rows % 2, (context_len + block_size - 1) // block_size * heads
        query, acc = np.zeros((heads * height, dim), f32), np.zeros((heads * height, dim), f32)
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
