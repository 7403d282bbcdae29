"""CPU kernels for processors with AVX512-BF16 and without AMX, in bfloat16.

Products of few rows, and attention of many queries to the same keys. The rules and shapes are those
of cpu/kernels.py. LLVM compiles them only for a processor with these instructions.

A product of few rows takes as long as reading its weights. oneDNN reads 16 GB/s of them for one row
and 14 for 16 rows on the 2 cores of an EPYC; this kernel reads 27 and 15.
"""

import sys

import numba
import numpy as np
from llvmlite.binding import get_host_cpu_features

from nanovllm.cpu import packs
from nanovllm.cpu.dot import BF16, dot_rows
from nanovllm.cpu.jit import compiled
from nanovllm.cpu.packs import count_queries, kv_address
from nanovllm.cpu.primitives import BFLOAT16, array, exp, f32, from_float32, maximum, to_float32

WIDTH = 64  # outputs of a block of the packed weight: four vectors of 16
# Prefetch distance of weights.
PREFETCH_BYTES = 4096
# Attention takes this many rows (queries times heads of a group) and keys at a time, and this many
# rows from a pack.
ROWS, KEYS = 8, 32
MAX_PACK_ROWS = 64


def has_avx512_bf16() -> bool:
    """Whether Numba compiles for this processor, and it has the instructions."""
    named = numba.config.CPU_NAME or numba.config.CPU_FEATURES
    return not named and sys.byteorder == "little" and get_host_cpu_features().get("avx512bf16")


@compiled()
def linear_blocks(x_ptr, weight_ptr, bias_ptr, out_ptr, rows, inputs, outputs, start, stop):
    """out [rows, outputs] = x [rows, inputs] W^T + bias: blocks [start, stop) of 64 outputs.

    oneDNN packs W as [outputs / 64, inputs / 2, 64, 2]. All groups of rows have the same height,
    so the last one may start early and compute some rows again.
    """
    out = array(out_ptr, (rows, outputs // WIDTH, WIDTH), BFLOAT16)
    height = 1 if rows < 2 else 2 if rows < 4 else 4 if rows == 5 or rows % 4 == 0 else 6
    acc, bias, stride = np.empty((6, WIDTH), f32), np.zeros(WIDTH, f32), 2 * inputs
    for block in range(start, stop):
        if bias_ptr != 0:
            for c in range(WIDTH):
                bias[c] = to_float32(array(bias_ptr, (outputs,), BFLOAT16)[WIDTH * block + c])
        w = weight_ptr + block * WIDTH * stride
        for group in range((rows + height - 1) // height):
            first = min(group * height, rows - height)
            # Not `acc[:] = bias`, whose error message takes seconds to compile.
            for i in range(height):
                for c in range(WIDTH):
                    acc[i, c] = bias[c]
            x, to = x_ptr + first * stride, np.int64(acc.ctypes.data)
            if height == 6:
                dot_rows(BF16, 6, 4, 1, PREFETCH_BYTES, x, stride, w, inputs // 2, to, 4 * WIDTH)
            elif height == 4:
                dot_rows(BF16, 4, 4, 1, PREFETCH_BYTES, x, stride, w, inputs // 2, to, 4 * WIDTH)
            elif height == 2:
                dot_rows(BF16, 2, 4, 2, PREFETCH_BYTES, x, stride, w, inputs // 2, to, 4 * WIDTH)
            else:
                dot_rows(BF16, 1, 4, 4, PREFETCH_BYTES, x, stride, w, inputs // 2, to, 4 * WIDTH)
            for i in range(height):
                row = out[first + i, block]
                for c in range(WIDTH):
                    row[c] = from_float32(acc[i, c], BFLOAT16)


@compiled(no_nan=True)
def attend_packs(qkv, out, lse, k_cache, v_cache, queries, context_lens, block_tables, is_prefix,
                 start, stop):
    """packs.attend_packs in bfloat16: tiles of 8 rows and 32 keys, for packs of 8 rows and more.

    For each pack K is transposed to pairs of dimensions of 32 tokens, and V to pairs of tokens. A
    prompt of 512 tokens with the heads of Qwen3-0.6B takes 8 ms, and torch's attention 26. The weights are rounded before they are summed. As 0 times
    infinity is NaN, an infinity in V makes NaN in rows that do not attend to its token.
    """
    block_size, dim, group = k_cache.shape[2], k_cache.shape[3], out.shape[1] // k_cache.shape[1]
    scale, row_bytes = f32(1) / np.sqrt(f32(dim)), 2 * dim
    max_rows = (queries.shape[1] * group + ROWS - 1) // ROWS * ROWS
    max_keys = (block_tables.shape[1] * block_size + KEYS - 1) // KEYS * KEYS
    query, acc = np.empty((max_rows, dim), np.uint16), np.empty((max_rows, dim), f32)
    keys = np.empty((dim // 2, KEYS), np.uint32)
    values = np.empty((dim // 32, KEYS // 2, 32), np.uint32)
    scores = np.empty((max_rows, max_keys), f32)
    weights = np.empty((max_rows, max_keys), np.uint16)
    row_sum = np.empty(max_rows, f32)
    num_kv_heads, item = k_cache.shape[1], start
    while item < stop:
        p, head = item // num_kv_heads, item % num_kv_heads
        table, count = block_tables[p], count_queries(queries[p])
        rows, context_len = count * group, context_lens[p, count - 1]
        if rows < ROWS:
            following = min(stop, item + num_kv_heads - head)
            packs.attend_packs(
                qkv, out, lse, k_cache, v_cache, queries, context_lens, block_tables, is_prefix, item,
                following)
            item = following
            continue
        item += 1
        padded = (rows + ROWS - 1) // ROWS * ROWS
        num_keys = (context_len + KEYS - 1) // KEYS * KEYS
        query[rows:padded], scores[:padded, :num_keys], weights[rows:padded, :num_keys] = 0, 0, 0
        for r in range(rows):
            q = qkv[queries[p, r // group], head * group + r % group]
            for d in range(dim):
                query[r, d] = q[d]
        for first in range(0, num_keys, KEYS):
            for j in range(KEYS):
                slot = min(first + j, context_len - 1)
                address = kv_address(k_cache, table[slot // block_size], head, slot % block_size)
                k = array(address, (dim // 2,), np.uint32(0))
                for d in range(dim // 2):
                    keys[d, j] = k[d]
            for r in range(0, padded, ROWS):
                dot_rows(
                    BF16, 8, 2, 1, 0, np.int64(query[r:].ctypes.data), row_bytes,
                    np.int64(keys.ctypes.data), dim // 2,
                    np.int64(scores[r:, first:].ctypes.data), 4 * max_keys)

        for r in range(rows):
            token, h = queries[p, r // group], head * group + r % group
            visible = context_lens[p, r // group]
            prefix_lse = f32(-np.inf) if is_prefix else lse[token, h]
            row_max = max(prefix_lse, maximum(scores[r, :visible]) * scale)
            prefix_sum = exp(prefix_lse - row_max) if prefix_lse > -np.inf else f32(0)
            total = f32(0)
            for t in range(visible):
                weight = from_float32(exp(scores[r, t] * scale - row_max), BFLOAT16)
                weights[r, t] = weight
                total += to_float32(weight)
            weights[r, visible:num_keys] = 0
            row_sum[r] = total + prefix_sum
            for d in range(dim):
                acc[r, d] = prefix_sum * to_float32(out[token, h, d]) if prefix_sum > 0 else f32(0)
            if is_prefix:
                lse[token, h] = row_max + np.log(row_sum[r])

        for first in range(0, num_keys, KEYS):
            for j in range(KEYS // 2):
                # Slots after the last token may hold NaN, and 0 times NaN is NaN.
                slot, after = first + 2 * j, first + 2 * j + 1
                a = array(kv_address(
                    v_cache, table[min(slot, context_len - 1) // block_size], head,
                    min(slot, context_len - 1) % block_size), (dim // 32, 32), BFLOAT16)
                b = array(kv_address(
                    v_cache, table[min(after, context_len - 1) // block_size], head,
                    min(after, context_len - 1) % block_size), (dim // 32, 32), BFLOAT16)
                low = np.uint32(0xFFFF if slot < context_len else 0)
                high = np.uint32(0xFFFF if after < context_len else 0)
                for c in range(dim // 32):
                    for d in range(32):
                        values[c, j, d] = (np.uint32(a[c, d]) & low) | (
                            (np.uint32(b[c, d]) & high) << np.uint32(16))
            for r in range(0, padded, ROWS):
                for c in range(dim // 32):
                    dot_rows(
                        BF16, 8, 2, 1, 0, np.int64(weights[r:, first:].ctypes.data), 2 * max_keys,
                        np.int64(values[c].ctypes.data), KEYS // 2,
                        np.int64(acc[r:, 32 * c :].ctypes.data), 4 * dim)
        for r in range(rows):
            result = out[queries[p, r // group], head * group + r % group]
            for d in range(dim):
                result[d] = from_float32(acc[r, d] / row_sum[r], BFLOAT16)
