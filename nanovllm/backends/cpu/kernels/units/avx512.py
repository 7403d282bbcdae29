"""The unit of processors with AVX512-BF16 and without AMX: products of few rows, attention.

It works in bfloat16. The rules and shapes are in kernels/pointwise.py, QueryGroups in any.py.
LLVM compiles these kernels only for a processor with these instructions.

A product of few rows takes as long as reading its weights. On the 2 cores of an EPYC, oneDNN reads
16 GB/s of them for one row and this kernel 27; docs/measurements.md has more rows.
"""

import numpy as np
import torch

from nanovllm.backends.cpu.jit import compiled, has_feature
from nanovllm.backends.cpu.kernels.llvm.dot import BF16, dot_rows
from nanovllm.backends.cpu.kernels.primitives import (
    BFLOAT16,
    array,
    exp,
    f32,
    from_float32,
    load_bias,
    to_float32,
)
from nanovllm.backends.cpu.kernels.units.any import Unit, count_queries, kv_address
from nanovllm.backends.cpu.kernels.units.any import attend_groups as attend_small_groups

WIDTH = 64  # outputs of a block of the packed weight: four vectors of 16
# With several panels of rows, a product takes this many inputs of a block at a time. Their weights,
# 8 kB, are also how far ahead any product prefetches.
INPUTS = 64
# Attention takes this many rows (queries times heads of a KV head) and keys at a time, and this
# many rows of a group.
ROWS, KEYS = 32, 32
MAX_ROWS = 64
# Groups of fewer rows are left to units/any.py.
MIN_ROWS = 8


@compiled()
def linear_blocks(x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example,
                  start, stop):
    """Compute blocks of 64 outputs, as kernels/product.py describes.

    oneDNN packs W as [outputs / 64, inputs / 2, 64, 2]. The rows of x are divided into panels of
    the same height, so the last panel may start early and compute some rows again.

    Of several panels, the first one reads 8 kB of weights from memory, and the others read them
    from the cache. To keep memory busy meanwhile, the panels share the prefetch of the next 8 kB:
    two or three take half each, four and more a quarter each.
    """
    out = array(out_ptr, (rows, outputs), BFLOAT16)
    height = 1 if rows < 2 else 2 if rows < 4 else 4 if rows == 5 or rows % 4 == 0 else 6
    panels = (rows + height - 1) // height
    span = inputs if panels == 1 else INPUTS
    lines = (panels + 3) // panels  # of the four cache lines of a step, what a panel prefetches
    acc, bias = np.empty((panels * height, WIDTH), f32), np.zeros(WIDTH, f32)
    for block in range(start, stop):
        o = WIDTH * block
        count = min(WIDTH, outputs - o)
        load_bias(bias_ptr, o, bias[:count], BFLOAT16)
        # The error message of `acc[:] = bias` would take seconds to compile.
        for i in range(panels * height):
            for c in range(WIDTH):
                acc[i, c] = bias[c]
        for first in range(0, inputs, span):
            steps = min(span, inputs - first) // 2
            weights = weight_ptr + 2 * WIDTH * (block * inputs + first)
            w = weights, 4 * WIDTH
            for panel in range(panels):
                row = min(panel * height, rows - height)
                x = x_ptr + 2 * (row * inputs + first), 2 * inputs, 4
                to = np.int64(acc[panel * height :].ctypes.data), 4 * WIDTH
                # Beyond 4, this is the beginning of the weights after the next ones.
                fetched = min(panel * lines, 4)
                ahead = weights + 2 * WIDTH * INPUTS + fetched * 64 * steps, 64 * lines, lines
                if height == 6:
                    dot_rows(BF16, 6, 4, 1, x, w, steps, to, ahead)
                elif height == 4:
                    dot_rows(BF16, 4, 4, 1, x, w, steps, to, ahead)
                elif height == 2:
                    dot_rows(BF16, 2, 4, 2, x, w, steps, to, ahead)
                else:
                    dot_rows(BF16, 1, 4, 4, x, w, steps, to, ahead)
        for panel in range(panels):
            row = min(panel * height, rows - height)
            for i in range(height):
                result = out[row + i, o : o + count]
                for c in range(count):
                    result[c] = from_float32(acc[panel * height + i, c], BFLOAT16)


@compiled(no_nan=True)
def attend_groups(qkv, out, lse, k_cache, v_cache, queries, context_lens, block_tables, is_prefix,
                 start, stop):
    """Compute any.attend_groups in bfloat16, for groups of 8 rows and more.

    scores = K q, for 8 keys, in the layout of the cache, and 32 rows at a time. The queries are
    transposed once per group:

            dims 0  1   2  3                row 0   row 1               row 0   1
        token 0 [ k  k | k  k |     dims 0, 1 [ q  q | q  q |       token 0 [ s | s |
        token 1 [ k  k | k  k |  x       2, 3 [ q  q | q  q |   =   token 1 [ s | s |

    The rows are therefore side by side in memory, and the softmax takes 16 of them at a time.

    out = w V, for 8 rows and 32 dimensions at a time. V's tokens are interleaved in pairs:

         tokens 0  1   2  3                 dim 0   dim 1               dim 0   1
          row 0 [ w  w | w  w |   tokens 0, 1 [ v  v | v  v |         row 0 [ o | o |
          row 1 [ w  w | w  w |  x       2, 3 [ v  v | v  v |   =     row 1 [ o | o |

    The weights are rounded before they are summed. As 0 times infinity is NaN, an infinity in V
    can make NaN in all rows of the group. A prompt of 512 tokens with the heads of Qwen3-0.6B takes
    4.4 ms at best, and torch's attention took 26.
    """
    _, num_kv_heads, block_size, dim = k_cache.shape
    q_per_kv, pairs, scale = out.shape[1] // num_kv_heads, dim // 2, f32(1) / np.sqrt(f32(dim))
    if queries.shape[1] * q_per_kv < MIN_ROWS:
        attend_small_groups(
            qkv, out, lse, k_cache, v_cache, queries, context_lens, block_tables, is_prefix, start,
            stop)
        return
    max_rows = (queries.shape[1] * q_per_kv + ROWS - 1) // ROWS * ROWS
    max_keys = (block_tables.shape[1] * block_size + KEYS - 1) // KEYS * KEYS
    query = np.zeros((max_rows // ROWS, pairs, ROWS), np.uint32)
    keys = np.empty((KEYS, pairs), np.uint32)
    scores, values = np.empty((max_keys, max_rows), f32), np.empty((KEYS // 2, dim), np.uint32)
    weights, acc = np.empty((max_keys // 2, max_rows), np.uint32), np.empty((max_rows, dim), f32)
    visible = np.empty(max_rows, np.int32)
    row_max, row_sum = np.empty(max_rows, f32), np.empty(max_rows, f32)
    item = start
    while item < stop:
        p, head = item // num_kv_heads, item % num_kv_heads
        table, count = block_tables[p], count_queries(queries[p])
        rows, context_len = count * q_per_kv, context_lens[p, count - 1]
        if rows < MIN_ROWS:
            following = min(stop, item + num_kv_heads - head)
            attend_small_groups(
                qkv, out, lse, k_cache, v_cache, queries, context_lens, block_tables, is_prefix,
                item, following)
            item = following
            continue
        item += 1
        padded = (rows + ROWS - 1) // ROWS * ROWS
        num_keys = (context_len + KEYS - 1) // KEYS * KEYS
        visible[:padded], row_max[:padded], row_sum[:padded] = 0, -np.inf, 0
        for r in range(rows):
            token, h = queries[p, r // q_per_kv], head * q_per_kv + r % q_per_kv
            q = array(qkv[token, h].ctypes.data, (pairs,), np.uint32(0))
            for d in range(pairs):
                query[r // ROWS, d, r % ROWS] = q[d]
            visible[r] = context_lens[p, r // q_per_kv]
            if not is_prefix:
                row_max[r] = lse[token, h]

        for first in range(0, num_keys, KEYS):
            for j in range(KEYS):
                # The last token stands for the slots after it, which a table may not have.
                slot = min(first + j, context_len - 1)
                address = kv_address(k_cache, table[slot // block_size], head, slot % block_size)
                k = array(address, (pairs,), np.uint32(0))
                for d in range(pairs):
                    keys[j, d] = k[d]
            scores[first : first + KEYS, :padded] = 0
            for r in range(0, padded, ROWS):
                for j in range(0, KEYS, 8):
                    x = np.int64(keys[j:].ctypes.data), 2 * dim, 4
                    to = np.int64(scores[first + j :, r:].ctypes.data), 4 * max_rows
                    w = np.int64(query[r // ROWS].ctypes.data), 4 * ROWS
                    dot_rows(BF16, 8, 2, 1, x, w, pairs, to, (0, 0, 0))

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
        for t in range(num_keys // 2):
            for r in range(padded):
                a = from_float32(exp(scores[2 * t, r] * scale - row_max[r]), BFLOAT16)
                b = from_float32(exp(scores[2 * t + 1, r] * scale - row_max[r]), BFLOAT16)
                a = a if 2 * t < visible[r] else np.uint16(0)
                b = b if 2 * t + 1 < visible[r] else np.uint16(0)
                row_sum[r] += to_float32(a) + to_float32(b)
                weights[t, r] = np.uint32(a) | (np.uint32(b) << np.uint32(16))

        for first in range(0, num_keys, KEYS):
            for j in range(KEYS // 2):
                # Slots after the last token may hold NaN, and 0 times NaN is NaN.
                slot = min(first + 2 * j, context_len - 1)
                after = min(first + 2 * j + 1, context_len - 1)
                address = kv_address(v_cache, table[slot // block_size], head, slot % block_size)
                v = array(address, (dim,), BFLOAT16)
                address = kv_address(v_cache, table[after // block_size], head, after % block_size)
                next_v = array(address, (dim,), BFLOAT16)
                for d in range(dim):
                    values[j, d] = np.uint32(v[d]) | (np.uint32(next_v[d]) << np.uint32(16))
            for r in range(0, rows, 8):
                x = np.int64(weights[first // 2 :, r:].ctypes.data), 4, 4 * max_rows
                for d in range(0, dim, 32):
                    w = np.int64(values[:, d:].ctypes.data), 4 * dim
                    to = np.int64(acc[r:, d:].ctypes.data), 4 * dim
                    dot_rows(BF16, 8, 2, 1, x, w, KEYS // 2, to, (0, 0, 0))

        for r in range(rows):
            token, h = queries[p, r // q_per_kv], head * q_per_kv + r % q_per_kv
            if is_prefix:
                lse[token, h] = row_max[r] + np.log(row_sum[r])
            result = out[token, h]
            for d in range(dim):
                result[d] = from_float32(acc[r, d] / row_sum[r], BFLOAT16)


AVX512 = Unit(
    max_rows=MAX_ROWS,
    reads_prompts=True,
    attend_groups=attend_groups,
    linear_blocks=linear_blocks,
    width=WIDTH,
    linear_dtype=torch.bfloat16,
    is_available=lambda: has_feature("avx512bf16"),
    fits=lambda group_size, block_size, head_dim: head_dim % 32 == 0,
)
