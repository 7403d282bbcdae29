"""The unit of any processor: attention of few queries, and products of few rows in float32.

Queries that read the same blocks are computed in groups. The rules and shapes are in
backends/cpu/kernels/pointwise.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.backends.cpu.jit import Kernel, compiled
from nanovllm.backends.cpu.kernels.llvm.dot import FLOAT32, dot_rows
from nanovllm.backends.cpu.kernels.llvm.vectors import LANES, add_two, score_two
from nanovllm.backends.cpu.kernels.parallel import in_parts
from nanovllm.backends.cpu.kernels.primitives import (
    array,
    exp,
    f32,
    from_float32,
    load_bias,
    maximum,
    to_float32,
)

# Prefetch distance of KV, in tiles of 16 tokens or (in attend_groups) of a block: 28 layers of
# attention over 16 x 192 tokens take 20 ms instead of 27 ms.
PREFETCH_TILES = 2
# The largest number of rows of a group of several queries: with AMX each takes two of a tile's 16.
MAX_ROWS = 8
# The product: outputs of a block of the packed weight, and the inputs of a block that all rows are
# multiplied with before the next ones. Their weights take 16 kB of a cache.
WIDTH, INPUTS = 64, 64


@dataclass(eq=False)
class Unit:
    """Attention, and products of few rows, for processors that have the same instructions."""

    # A group of several queries has at most so many rows: queries times the heads of a KV head.
    max_rows: int
    # Whether attention of many queries is faster than torch's.
    reads_prompts: bool
    attend_groups: Kernel
    # The kernel of products, which reads blocks of `width` outputs of a packed weight.
    linear_blocks: Kernel
    width: int
    # The dtype of x and the weights. In another one, oneDNN computes all products.
    linear_dtype: torch.dtype
    # Returns whether Numba compiles for this processor, and this process can use the unit.
    is_available: Callable[[], bool]
    # Returns whether `attend_groups` supports G heads per KV head, B slots, head size D.
    fits: Callable[[int, int, int], bool]


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
def attend_groups(qkv, out, lse, k_cache, v_cache, queries, context_lens, block_tables, is_prefix,
                 start, stop):
    """Compute attention for items [start, stop) of the P * K pairs of a group and a KV head.

    qkv [T, H + 2K, D] and out [T, H, D] may have more rows; lse [T, H]. The prefix pass writes out
    and lse, and the other pass merges them into out. The rows of a group are its queries times G
    heads. All items of a group are computed together, to read the cache as it lies in memory:
    blocks, then heads, then tokens. An odd last row is paired with zeros.
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


@compiled()
def linear_blocks(x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example,
                  start, stop):
    """Compute blocks of 64 outputs in float32, as kernels/product.py describes.

    oneDNN packs W as [outputs / 64, inputs, 64]. The sums of up to 6 rows and 16 outputs fit into
    the 16 registers of AVX2. The rows of x are divided into panels of the same height, and the last
    row fills the last panel. A panel is stored as [inputs, height]: rows that begin a multiple of
    4 kB apart would all have the same place in a cache.

    The first panel reads weights from memory, and the others read them from the cache. All panels
    together prefetch the next ones, one line in each step, to keep memory busy meanwhile. For one
    row the processor's own prefetching is faster.
    """
    out = array(out_ptr, (rows, outputs), f32(0))
    height = 1 if rows == 1 else 4 if rows <= 4 or 7 <= rows <= 8 else 6
    panels = (rows + height - 1) // height
    columns = 64 if height == 1 else 16  # outputs at a time
    x = array(x_ptr, (rows, inputs), f32(0))
    packed = np.empty((panels, inputs, height), f32)
    for panel in range(panels):
        for r in range(height):
            row = min(panel * height + r, rows - 1)
            for i in range(inputs):
                packed[panel, i, r] = x[row, i]
    acc, bias = np.empty((panels * height, WIDTH), f32), np.zeros(WIDTH, f32)
    for block in range(start, stop):
        o = WIDTH * block
        count = min(WIDTH, outputs - o)
        load_bias(bias_ptr, o, bias[:count], f32(0))
        for r in range(panels * height):
            for c in range(WIDTH):
                acc[r, c] = bias[c]
        for first in range(0, inputs, INPUTS):
            steps = min(INPUTS, inputs - first)
            weights = weight_ptr + 4 * WIDTH * (block * inputs + first)
            ahead, stride = weights + 4 * WIDTH * steps, 64 // panels
            for panel in range(panels):
                x_panel = np.int64(packed[panel, first:].ctypes.data), 4, 4 * height
                sums = np.int64(acc[panel * height :].ctypes.data)
                for c in range(0, WIDTH, columns):
                    w, to = (weights + 4 * c, 4 * WIDTH), (sums + 4 * c, 4 * WIDTH)
                    if height == 6:
                        dot_rows(FLOAT32, 6, 1, 1, x_panel, w, steps, to, (ahead, stride, 1))
                    elif height == 4:
                        dot_rows(FLOAT32, 4, 1, 1, x_panel, w, steps, to, (ahead, stride, 1))
                    else:
                        dot_rows(FLOAT32, 1, 4, 1, x_panel, w, steps, to, (0, 0, 0))
                    ahead += stride * steps
        for row in range(rows):
            for c in range(count):
                out[row, o + c] = acc[row, c]


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


ANY = Unit(
    max_rows=MAX_ROWS,
    reads_prompts=False,
    attend_groups=attend_groups,
    linear_blocks=linear_blocks,
    width=WIDTH,
    linear_dtype=torch.float32,
    is_available=lambda: True,
    fits=lambda group_size, block_size, head_dim: True,
)
