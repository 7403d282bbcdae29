"""Attention of queries in groups that read the same blocks. The rules are in pointwise.py.

Of many rows, such as a prompt's, it is two matrix products, in float32 or, with AVX512-BF16 and a
KV cache in bfloat16, in pairs of bfloat16. few_queries.py computes groups of few rows.
"""

import numpy as np

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.few_queries import attend_few, kv_address
from nanovllm.backends.cpu.kernels.llvm.dot import dot_rows
from nanovllm.backends.cpu.kernels.llvm.vectors import LANES
from nanovllm.backends.cpu.kernels.parallel import in_parts
from nanovllm.backends.cpu.kernels.primitives import (
    array,
    bytes_of,
    exp,
    f32,
    from_float32,
    to_float32,
)
from nanovllm.backends.cpu.kernels.words import (
    HEIGHT,
    WIDTH,
    joined,
    stored_word,
    word,
    word_array,
)

# From so many rows of a group on (times the numbers of a word) its attention is two products.
# So is all attention with heads whose size is no multiple of 16.
MANY_ROWS = 16
# The largest number of rows of a group of several queries.
MAX_ROWS = 64
KEYS = 32  # keys of a product


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
    interleaved:

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
    many_rows = MANY_ROWS if dim % LANES == 0 else 1
    if queries.shape[1] * q_per_kv * per_word < many_rows:
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
        table, count = block_tables[p], np.sum(queries[p] >= 0)
        rows, context_len = count * q_per_kv, context_lens[p, count - 1]
        if rows * per_word < many_rows:
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
                    dot_rows(keys[0, 0], HEIGHT, WIDTH, x, w, words, to, (0, 0))

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
                row_sum[r] += a + b if per_word > 1 else a

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
                    dot_rows(keys[0, 0], HEIGHT, WIDTH, x, w, KEYS // per_word, to, (0, 0))

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

    attend_groups_at is the address of attend_groups.
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
