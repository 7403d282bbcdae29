"""The unit of processors with AMX, Intel's matrix instructions: attention, products of few rows.

It works in bfloat16. The rules and shapes are in kernels/pointwise.py, QueryGroups in any.py.
LLVM compiles these kernels only for a processor with AMX.

There are eight tiles of up to 16 rows of up to 64 bytes. tile_dot multiplies bfloat16 numbers in
pairs, which are neighbours in a row of A and in a row of B, and sums in float32 over all k:

    C[m, n] += A[m, 2k] B[k, 2n] + A[m, 2k + 1] B[k, 2n + 1]
"""

import ctypes
import sys

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from nanovllm.backends.cpu.jit import compiled, has_feature
from nanovllm.backends.cpu.kernels.llvm.calls import BYTE, INT, VOID, call, instruction, pointer_to
from nanovllm.backends.cpu.kernels.primitives import (
    BFLOAT16,
    array,
    exp,
    f32,
    from_float32,
    load_bias,
    maximum,
    prefetch_range,
)
from nanovllm.backends.cpu.kernels.units.any import (
    MAX_ROWS,
    PREFETCH_TILES,
    Unit,
    count_queries,
    kv_address,
)

TILE_ROWS = 16
WIDTH = 32  # outputs of a block of the packed weight
# Prefetch distance of weights, in each block that is read.
PREFETCH_BYTES = 2048
# The tiles of attend_groups. Tiles 0 to 3 accumulate.
ACCUMULATORS = 4
WEIGHTS, KV, QUERY, SCORES = 4, 5, 6, 7

# tile_config sets all shapes from uint8 [64]: [0] is 1, [16 + 2t] the bytes per row of tile t, and
# [48 + t] its rows. tile_load and tile_store access rows that begin `stride` bytes apart.
_literal = intrinsic(prefer_literal=True)
tile_config = intrinsic(lambda typing, config: instruction("x86.ldtilecfg", "array", config))
tile_release = intrinsic(lambda typing: instruction("x86.tilerelease", ""))
tile_zero = _literal(lambda typing, tile: instruction("x86.tilezero", "tile", tile))
tile_load = _literal(lambda typing, tile, address, stride: instruction(
    "x86.tileloadd64", "tile address number", tile, address, stride))
tile_store = _literal(lambda typing, tile, address, stride: instruction(
    "x86.tilestored64", "tile address number", tile, address, stride))
tile_dot = _literal(lambda typing, c, a, b: instruction("x86.tdpbf16ps", "tile tile tile", c, a, b))
# This multiplies four int8 numbers of A and four uint8 numbers of B at a time. C is int32.
tile_dot_int8 = _literal(
    lambda typing, c, a, b: instruction("x86.tdpbsud", "tile tile tile", c, a, b))


def for_accumulators(emit):
    """Return an intrinsic: emit(builder, tile, address, step) for each of `count` accumulators."""

    def definition(typing, count, address, step):
        def generate(context, builder, signature, args):
            count, address, step = args
            for tile in range(ACCUMULATORS):
                with builder.if_then(builder.icmp_signed(">", count, INT(tile))):
                    emit(builder, tile, address, step)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    return intrinsic(definition)


@for_accumulators
def load_accumulators(builder, tile, address, step):
    """Load accumulators that begin `step` bytes apart, in rows of 64 bytes."""
    pointer = pointer_to(builder, builder.add(address, builder.mul(step, INT(tile))))
    call(builder, "x86.tileloadd64", VOID, BYTE(tile), pointer, INT(64))


@for_accumulators
def store_accumulators(builder, tile, address, step):
    """Store accumulators where load_accumulators loads them."""
    pointer = pointer_to(builder, builder.add(address, builder.mul(step, INT(tile))))
    call(builder, "x86.tilestored64", VOID, BYTE(tile), pointer, INT(64))


@for_accumulators
def add_values(builder, tile, address, stride):
    """Add WEIGHTS times V. Each accumulator takes the next 64 bytes of the rows of V."""
    pointer = pointer_to(builder, builder.add(address, INT(64 * tile)))
    call(builder, "x86.tileloadd64", VOID, BYTE(KV), pointer, stride)
    call(builder, "x86.tdpbf16ps", VOID, BYTE(tile), BYTE(WEIGHTS), BYTE(KV))


@compiled()
def place(item, is_prefix, num_kv_heads, num_groups):
    """Return the KV head and the group of an item.

    Groups that share a prefix read the same memory: they follow one another, so that it is in a
    cache. Other groups share nothing, and the heads of a block are neighbours in memory.
    """
    if is_prefix:
        return item // num_groups, item % num_groups
    return item % num_kv_heads, item // num_kv_heads


@compiled(no_nan=True)
def attend_groups(qkv, out, lse, k_cache, v_cache, queries, context_lens, block_tables, is_prefix,
                 start, stop):
    """Compute any.attend_groups in bfloat16 by AMX, with tiles of K and V as the cache has them.

    scores = K q. A is 16 tokens by 32 dimensions of K, and B the same dimensions of the rows' q:

            dims 0  1   2  3                row 0   row 1               row 0   1
        token 0 [ k  k | k  k |     dims 0, 1 [ q  q | q  q |       token 0 [ s | s |
        token 1 [ k  k | k  k |  x       2, 3 [ q  q | q  q |   =   token 1 [ s | s |

    out = w V. B is 16 tokens by 32 dimensions of V. A pair in B is two dimensions of one token, but
    tile_dot expects two tokens of one dimension. Pairs (w, 0) therefore select the even dimensions,
    pairs (0, w) the odd ones, and each row of the group takes two rows of A and C:

             token 0   1                 dims 0  1   2  3                  dims 0, 1   2, 3
        row 0  [ w  0 | w  0 |        token 0 [ v  v | v  v |      row 0, even [ o0  |  o2  |
        row 0  [ 0  w | 0  w |   x    token 1 [ v  v | v  v |   =  row 0, odd  [ o1  |  o3  |

    The weights are rounded before they are summed. As 0 times infinity is NaN, an infinity in V
    makes the other number of its pair NaN, and both in rows that do not attend to its token.
    """
    _, num_kv_heads, block_size, dim = k_cache.shape
    q_per_kv, scale = out.shape[1] // num_kv_heads, f32(1) / np.sqrt(f32(dim))
    row_bytes, columns = 2 * dim, dim // 32
    max_tiles = block_tables.shape[1] * block_size // TILE_ROWS
    max_rows = queries.shape[1] * q_per_kv
    # Addresses of tiles in prefetch order: K, V beginning with the last tile, K of the next item.
    tile_ptrs = np.empty(2 * max_tiles + PREFETCH_TILES, np.int64)
    config = np.zeros(64, np.uint8)
    query = np.empty(dim // 2 * max_rows, np.uint32)
    tile_scores = np.empty(TILE_ROWS * max_rows, f32)
    scores = np.empty((max_rows, max_tiles * TILE_ROWS), f32)
    # With an odd number of cache lines per row, the rows of a tile do not compete for cache sets.
    weights = np.empty((2 * max_rows, (max_tiles | 1) * TILE_ROWS), np.uint32)
    acc = np.empty((columns, 2 * max_rows, 16), f32)
    row_sum = np.empty(max_rows, f32)
    tail = np.empty((TILE_ROWS, dim), np.uint16)
    qkv_pairs = array(qkv.ctypes.data, (len(qkv), qkv.shape[1], dim // 2), np.uint32(0))
    out_pairs = array(out.ctypes.data, (len(out), out.shape[1], dim // 2), np.uint32(0))
    for item in range(start, stop):
        head, p = place(item, is_prefix, num_kv_heads, len(queries))
        table, count = block_tables[p], count_queries(queries[p])
        rows, context_len = count * q_per_kv, context_lens[p, count - 1]
        tiles = (context_len + TILE_ROWS - 1) // TILE_ROWS
        for i in range(tiles):
            slot = i * TILE_ROWS
            tile_ptrs[i] = kv_address(k_cache, table[slot // block_size], head, slot % block_size)
            j = tiles + 1 + i if i < tiles - 1 else tiles
            tile_ptrs[j] = kv_address(v_cache, table[slot // block_size], head, slot % block_size)
        next_head, next_p = place(min(item + 1, stop - 1), is_prefix, num_kv_heads, len(queries))
        for i in range(PREFETCH_TILES):
            slot = min(i, max_tiles - 1) * TILE_ROWS
            block = block_tables[next_p, slot // block_size]
            tile_ptrs[2 * tiles + i] = kv_address(
                k_cache, block, next_head, slot % block_size)

        # Tiles are 16 rows of 64 bytes, except where they depend on the rows of the group.
        config[0], config[16:32:2], config[48:56] = 1, 64, TILE_ROWS
        config[48 : 48 + WEIGHTS + 1] = 2 * rows
        config[16 + 2 * QUERY] = config[16 + 2 * SCORES] = 4 * rows
        tile_config(config)
        for r in range(rows):
            q = qkv_pairs[queries[p, r // q_per_kv], head * q_per_kv + r % q_per_kv]
            for d in range(dim // 2):
                query[d * rows + r] = q[d]
        for i in range(tiles):
            tile_zero(SCORES)
            for c in range(columns):
                prefetch_range(tile_ptrs[i + PREFETCH_TILES] + 64 * TILE_ROWS * c, 64 * TILE_ROWS)
                tile_load(KV, tile_ptrs[i] + 64 * c, row_bytes)
                tile_load(QUERY, query.ctypes.data + 64 * rows * c, 4 * rows)
                tile_dot(SCORES, KV, QUERY)
            tile_store(SCORES, tile_scores.ctypes.data, 4 * rows)
            for r in range(rows):
                for t in range(TILE_ROWS):
                    scores[r, i * TILE_ROWS + t] = tile_scores[t * rows + r] * scale

        for r in range(rows):
            token, h = queries[p, r // q_per_kv], head * q_per_kv + r % q_per_kv
            for t in range(context_lens[p, r // q_per_kv], tiles * TILE_ROWS):
                scores[r, t] = -np.inf
            prefix_lse = f32(-np.inf) if is_prefix else lse[token, h]
            row_max = max(prefix_lse, maximum(scores[r, : tiles * TILE_ROWS]))
            prefix_sum = exp(prefix_lse - row_max) if prefix_lse > -np.inf else f32(0)
            total = prefix_sum
            for t in range(tiles * TILE_ROWS):
                weight = np.uint32(from_float32(exp(scores[r, t] - row_max), BFLOAT16))
                high = np.uint32(weight << np.uint32(16))
                weights[r, t], weights[rows + r, t] = weight, high
                total += high.view(np.float32)
            # The smallest result of exp, e^-87, is not negligible if V is huge.
            for t in range(context_lens[p, r // q_per_kv], tiles * TILE_ROWS):
                weights[r, t], weights[rows + r, t] = np.uint32(0), np.uint32(0)
            row_sum[r] = total
            if is_prefix:
                lse[token, h] = row_max + np.log(total)
            for c in range(columns):
                for d in range(16):
                    pair = out_pairs[token, h, 16 * c + d] if prefix_sum > 0 else np.uint32(0)
                    even = np.uint32(pair << np.uint32(16)).view(np.float32)
                    odd = np.uint32(pair & np.uint32(0xFFFF0000)).view(np.float32)
                    acc[c, r, d], acc[c, rows + r, d] = prefix_sum * even, prefix_sum * odd

        # Slots after the last token may hold NaN, and 0 times NaN is NaN. The copy has zeros there.
        v = array(tile_ptrs[tiles], (TILE_ROWS, dim), BFLOAT16)
        for t in range(TILE_ROWS):
            for d in range(dim):
                tail[t, d] = v[t, d] if t < context_len - (tiles - 1) * TILE_ROWS else np.uint16(0)
        # Up to four columns of 32 dimensions share each load of the weights.
        for c in range(0, columns, ACCUMULATORS):
            acc_ptr, count = np.int64(acc[c].ctypes.data), min(columns - c, ACCUMULATORS)
            load_accumulators(count, acc_ptr, 128 * max_rows)
            for i in range(tiles):
                if c == 0:
                    prefetch_range(tile_ptrs[tiles + i + PREFETCH_TILES], TILE_ROWS * row_bytes)
                v_ptr = (tile_ptrs[tiles + i] if i else np.int64(tail.ctypes.data)) + 64 * c
                tile = i - 1 if i else tiles - 1
                tile_load(WEIGHTS, weights.ctypes.data + 64 * tile, 64 * (max_tiles | 1))
                add_values(count, v_ptr, row_bytes)
            store_accumulators(count, acc_ptr, 128 * max_rows)
        for r in range(rows):
            result = out_pairs[queries[p, r // q_per_kv], head * q_per_kv + r % q_per_kv]
            inv_sum = f32(1) / row_sum[r]
            for c in range(columns):
                even, odd, pair = acc[c, r], acc[c, rows + r], result[16 * c : 16 * c + 16]
                for d in range(16):
                    high = np.uint32(from_float32(odd[d] * inv_sum, BFLOAT16)) << np.uint32(16)
                    pair[d] = np.uint32(high | np.uint32(from_float32(even[d] * inv_sum, BFLOAT16)))
    tile_release()


@compiled()
def linear_blocks(x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example,
                  start, stop):
    """Compute blocks of 32 outputs by AMX, as kernels/product.py describes.

    oneDNN packs W as [outputs / 32, inputs / 2, 32, 2], which puts two tiles B side by side:

        output          0      1    ..    15     16     17   ..    31
        inputs 0, 1 [ w  w | w  w | .. | w  w | w  w | w  w | .. | w  w ]
               2, 3 [ w  w | w  w | .. | w  w | w  w | w  w | .. | w  w ]
                 .. [         tile 6          |         tile 7          ]

    Tiles 4 and 5 are 32 inputs of two sets of rows of x. All sets have the same height, so the last
    one may start early and compute some rows again. Up to 16 rows are one set, and two blocks are
    computed at a time: each tile of x serves both, and memory is read at two places, which is
    faster than at one. Tiles 0 to 3 accumulate.
    """
    out = array(out_ptr, (rows, outputs), BFLOAT16)
    panels = (rows + 2 * TILE_ROWS - 1) // (2 * TILE_ROWS)
    two_sets = rows > TILE_ROWS
    height = (rows + 2 * panels - 1) // (2 * panels) if two_sets else rows
    config = np.zeros(64, np.uint8)
    config[0], config[16:32:2], config[48:54], config[54:56] = 1, 64, height, TILE_ROWS
    tile_config(config)
    acc = np.empty((2, height, 32), f32)
    acc_ptr, half_bytes, x_stride = np.int64(acc.ctypes.data), 128 * height, 2 * inputs
    bias = np.zeros(32, f32)
    for block in range(start, stop, 1 if two_sets else 2):
        other_block = block if two_sets else min(block + 1, stop - 1)
        for panel in range(panels):
            first = min(2 * panel * height, rows - height)
            second = min(first + height, rows - height)
            x0, x1 = x_ptr + first * x_stride, x_ptr + second * x_stride
            w = weight_ptr + block * 32 * x_stride
            other = (other_block - block) * 32 * x_stride
            tile_zero(0)
            tile_zero(1)
            tile_zero(2)
            tile_zero(3)
            for _ in range(inputs // 32):
                if panel == 0:
                    prefetch_range(w + PREFETCH_BYTES, 2048)
                tile_load(6, w, 128)
                tile_load(7, w + 64, 128)
                tile_load(4, x0, x_stride)
                tile_dot(0, 4, 6)
                tile_dot(1, 4, 7)
                if two_sets:
                    tile_load(5, x1, x_stride)
                    tile_dot(2, 5, 6)
                    tile_dot(3, 5, 7)
                else:
                    prefetch_range(w + other + PREFETCH_BYTES, 2048)
                    tile_load(6, w + other, 128)
                    tile_load(7, w + other + 64, 128)
                    tile_dot(2, 4, 6)
                    tile_dot(3, 4, 7)
                x0, x1, w = x0 + 64, x1 + 64, w + 2048
            tile_store(0, acc_ptr, 128)
            tile_store(1, acc_ptr + 64, 128)
            tile_store(2, acc_ptr + half_bytes, 128)
            tile_store(3, acc_ptr + half_bytes + 64, 128)
            for half in range(2):
                begin, column = (second, other_block) if half else (first, block)
                o = WIDTH * column
                count = min(WIDTH, outputs - o)
                load_bias(bias_ptr, o, bias[:count], BFLOAT16)
                for i in range(height):
                    total, row = acc[half, i], out[begin + i, o : o + count]
                    for c in range(count):
                        row[c] = from_float32(total[c] + bias[c], BFLOAT16)
    tile_release()


def is_available(feature="amx-bf16"):
    """Return whether Linux permits this process to use tiles, and Numba compiles for `feature`."""
    if sys.platform != "linux" or not has_feature(feature):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


AMX = Unit(
    max_rows=MAX_ROWS,
    reads_prompts=False,
    attend_groups=attend_groups,
    linear_blocks=linear_blocks,
    width=WIDTH,
    linear_dtype=torch.bfloat16,
    is_available=is_available,
    fits=lambda group_size, block_size, head_dim: (
        group_size <= MAX_ROWS and block_size % TILE_ROWS == 0 and head_dim % 32 == 0),
)
