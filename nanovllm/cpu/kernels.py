"""CPU kernels in Python that Numba compiles, as Triton compiles those for a GPU.

A kernel changes only the memory that its docstring names. It takes the addresses of contiguous
tensors, because making a Numba array from a tensor takes longer than many kernels run.

Between two matrix products PyTorch makes about twelve calls of 10 to 15 us each, whatever they
compute, because the product has filled the caches with its weights. Here they are one kernel that
reads its input once. `decode_layers` is one call for all layers of a decode step.

NumPy has no bfloat16, so it is stored as uint16, the upper half of a float32. The type of the
argument `example` selects the stored dtype. Arithmetic is in float32. Results are rounded where
PyTorch rounds, except in the rotary embedding, where PyTorch also rounds each product.

Shapes: T tokens, P packs of M queries, H = K * G query heads that share K KV heads in groups of G,
D head size, B slots per block, E hidden size, F intermediate size, R rows of logits, V vocabulary.
"""

# Everything is in one file because Numba caches compiled code (in __pycache__ or NUMBA_CACHE_DIR)
# and compiles a kernel again only if its own file changes, not if that of a called function does.

import ctypes
import logging
import platform
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import carray, get_num_threads, njit, prange, types
from numba.extending import intrinsic, overload
from torch import Tensor

from nanovllm.models.layers import add_rms_norm as plain_add_rms_norm

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, so Numba compiles nothing; unset it")
logger = logging.getLogger("nanovllm")
LOCK = threading.RLock()


def guard() -> AbstractContextManager[object]:
    """Return what must be held while kernels run: LOCK if two threads may not call them at once.

    Numba has such a layer of threads, "workqueue", where it finds neither OpenMP nor TBB.
    """
    # In a thread of its own: Numba's start sets the number of OpenMP's threads of its thread.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(get_num_threads).result()
    return LOCK if numba.threading_layer() == "workqueue" else nullcontext()


def can_cache_code() -> bool:
    """Whether Numba finds a writable cache directory. Without one, cache=True is an error."""
    try:
        njit(cache=True)(can_cache_code)
    except RuntimeError:
        return False
    return True


def has_amx() -> bool:
    """Whether this process may use AMX for bfloat16, and Numba compiles for this processor."""
    named = numba.config.CPU_NAME or numba.config.CPU_FEATURES
    if named or sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    if not get_host_cpu_features().get("amx-bf16"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


# LLVM may reorder sums and fuse products, but NaN and infinity keep their meaning.
COMPILED: Any = dict(cache=can_cache_code(), nogil=True, error_model="numpy",
                     fastmath={"reassoc", "contract", "arcp", "nsz"})
# LLVM vectorizes a maximum only if it may assume that there is no NaN.
NO_NAN: Any = COMPILED | {"fastmath": COMPILED["fastmath"] | {"nnan"}}
# Prefetch distance of KV, in tiles of 16 tokens or (in attend_packs) in blocks: 28 layers of
# attention over 16 x 192 tokens take 20 ms instead of 27 ms.
PREFETCH_TILES = 2
# Prefetch distance of weights: the layers of Qwen3-0.6B take 36 ms instead of 42 ms.
PREFETCH_BYTES = 4096
CACHE_LINE = 64  # bytes
# The calling thread computes up to this many elements alone, because waking others takes 10 us.
SERIAL_ELEMENTS = 1 << 17

BFLOAT16 = np.uint16(0)
DTYPE_EXAMPLE = {torch.bfloat16: BFLOAT16, torch.float32: np.float32(0)}

f32 = np.float32


def instruction(name, kinds, operands, *constants):
    """Return what @intrinsic expects for a call to the LLVM function `name`.

    `kinds` says what each operand is: a tile (whose number must be a literal), an address, an array
    or a number of bytes. The int32 `constants` follow. An address does not keep its array alive:
    Numba frees an array after the last statement or loop that names it. Kernels therefore read
    `.ctypes.data` in the loop that uses it.
    """

    def generate(context, builder, signature, args):
        values, byte, full = [], ir.IntType(8), f"llvm.{name}"
        for kind, operand, arg in zip(kinds.split(), operands, args, strict=True):
            if kind == "tile":
                values.append(byte(operand.literal_value))
            elif kind == "address":
                values.append(builder.inttoptr(arg, byte.as_pointer()))
            elif kind == "array":
                data = context.make_array(operand)(context, builder, arg).data
                values.append(builder.bitcast(data, byte.as_pointer()))
            else:
                values.append(context.cast(builder, arg, operand, types.int64))
        values += [ir.IntType(32)(constant) for constant in constants]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        function = builder.module.globals.get(full) or ir.Function(builder.module, kind, full)
        builder.call(function, values)
        return context.get_dummy_value()

    return types.void(*operands), generate


@intrinsic
def prefetch(typing, address):
    """Load the cache line of an address without waiting: to read, into all levels, as data."""
    return instruction("prefetch.p0", "address", (address,), 0, 3, 1)


@intrinsic
def pointer(typing, address, example):
    """Cast an address to a pointer to numbers of the type of `example`."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(example)(address, example), generate


@njit(**COMPILED)
def array(address, shape, example):
    return carray(pointer(address, example), shape)


def to_float32(x):
    """Convert a stored number to float32."""
    raise NotImplementedError("compiled code only")


@overload(to_float32)
def _to_float32(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


def from_float32(x, example):
    """Round float32 to a stored number: to the nearest, ties to even."""
    raise NotImplementedError("compiled code only")


@overload(from_float32)
def _from_float32(x, example):
    def to_bfloat16(x, example):
        bits = np.float32(x).view(np.uint32)
        rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return np.uint16((bits + rounding) >> np.uint32(16)) if x == x else np.uint16(0x7FC0)

    return to_bfloat16 if example == types.uint16 else lambda x, example: f32(x)


@njit(**COMPILED)
def exp(x):
    """e^x for x clamped to [-87, 87]; the relative error is at most 3e-7 + 1e-7 |x|.

    LLVM vectorizes it, unlike libm's. If x / ln 2 = whole + part, then 2^whole is the exponent of a
    float, and a polynomial on [0, 1) approximates 2^part: the minimax one that is 1 at 0 and
    2 - 2^-23 at 1, so that e^0 is exactly 1, and e^x less than 1 for every x < 0.
    """
    x = min(max(x * f32(1.44269504), f32(-126)), f32(126))
    whole = np.floor(x)
    part = x - whole
    power = f32(1.8701225e-3) * part + f32(9.0106837e-3)
    power = (power * part + f32(5.5804454e-2)) * part + f32(2.4016321e-1)
    power = (power * part + f32(6.9315141e-1)) * part + f32(1)
    return power * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(**NO_NAN)
def maximum_in(x, lanes):
    """The maximum of x [n], n >= 1, in `lanes` [16]: LLVM does not vectorize a plain loop."""
    lanes[:] = x[0]
    whole = len(x) // 16 * 16
    for i in range(0, whole, 16):
        for c in range(16):
            lanes[c] = max(lanes[c], x[i + c])
    top = lanes[0]
    for c in range(1, 16):
        top = max(top, lanes[c])
    for i in range(whole, len(x)):
        top = max(top, x[i])
    return top


@njit(**NO_NAN)
def maximum(x):
    return maximum_in(x, np.empty(16, x.dtype))


@njit(**COMPILED)
def prefetch_range(address, size):
    for offset in range(0, size, CACHE_LINE):
        prefetch(address + offset)


# ---- AMX: Intel's matrix instructions ----
#
# There are eight tiles of up to 16 rows of up to 64 bytes. tile_dot multiplies bfloat16 numbers in
# pairs, which are neighbours in a row of A and in a row of B, and sums in float32 over all k:
#
#     C[m, n] += A[m, 2k] B[k, 2n] + A[m, 2k + 1] B[k, 2n + 1]
#
# tile_config sets all shapes from uint8 [64]: [0] is 1, [16 + 2t] the bytes per row of tile t, and
# [48 + t] its rows. tile_load and tile_store access rows that begin `stride` bytes apart.
_literal = intrinsic(prefer_literal=True)
tile_config = intrinsic(lambda typing, config: instruction("x86.ldtilecfg", "array", (config,)))
tile_release = intrinsic(lambda typing: instruction("x86.tilerelease", "", ()))
tile_zero = _literal(lambda typing, tile: instruction("x86.tilezero", "tile", (tile,)))
tile_load = _literal(lambda typing, tile, address, stride: instruction(
    "x86.tileloadd64", "tile address bytes", (tile, address, stride)))
tile_store = _literal(lambda typing, tile, address, stride: instruction(
    "x86.tilestored64", "tile address bytes", (tile, address, stride)))
tile_dot = _literal(lambda typing, c, a, b: instruction(
    "x86.tdpbf16ps", "tile tile tile", (c, a, b)))


# ---- between the matrix products ----
#
# Kernels named ..._rows compute rows [start, stop). Parallel ones divide all rows into `parts`.


@njit(**COMPILED)
def _add_rms_norm_rows(x_ptr, residual_ptr, weight_ptr, rows, size, eps, example, start, stop):
    """residual += x; x = RMSNorm(residual) * weight. x, residual [rows, size]."""
    x, residual = array(x_ptr, (rows, size), example), array(residual_ptr, (rows, size), example)
    weight = array(weight_ptr, (size,), example)
    for i in range(start, stop):
        squares = f32(0)
        for c in range(size):
            total = from_float32(to_float32(x[i, c]) + to_float32(residual[i, c]), example)
            residual[i, c] = total
            squares += to_float32(total) * to_float32(total)
        scale = f32(1) / np.sqrt(squares / f32(size) + f32(eps))
        for c in range(size):
            normed = from_float32(to_float32(residual[i, c]) * scale, example)
            x[i, c] = from_float32(to_float32(normed) * to_float32(weight[c]), example)


@njit(parallel=True, **COMPILED)
def _add_rms_norm(x_ptr, residual_ptr, weight_ptr, rows, size, eps, example, parts):
    for p in prange(parts):
        start, stop = p * rows // parts, (p + 1) * rows // parts
        _add_rms_norm_rows(x_ptr, residual_ptr, weight_ptr, rows, size, eps, example, start, stop)


@njit(**COMPILED)
def _silu_and_mul_rows(x_ptr, out_ptr, rows, size, example, start, stop):
    """out [rows, size] = silu(gate) * up, where x [rows, 2, size] = (gate, up)."""
    x, out = array(x_ptr, (rows, 2, size), example), array(out_ptr, (rows, size), example)
    for i in range(start, stop):
        for c in range(size):
            gate = to_float32(x[i, 0, c])
            activated = from_float32(gate / (f32(1) + exp(-gate)), example)
            out[i, c] = from_float32(to_float32(activated) * to_float32(x[i, 1, c]), example)


@njit(parallel=True, **COMPILED)
def _silu_and_mul(x_ptr, out_ptr, rows, size, example, parts):
    for p in prange(parts):
        start, stop = p * rows // parts, (p + 1) * rows // parts
        _silu_and_mul_rows(x_ptr, out_ptr, rows, size, example, start, stop)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor,
                 eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm(x + residual) * weight, x + residual); in place if residual is given. x [T, E]."""
    if residual is None:
        return plain_add_rms_norm(x, residual, weight, eps)
    rows, size = x.shape
    addresses = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
    if rows * size <= SERIAL_ELEMENTS:
        _add_rms_norm_rows(*addresses, rows, size, eps, DTYPE_EXAMPLE[x.dtype], 0, rows)
    else:
        _add_rms_norm(*addresses, rows, size, eps, DTYPE_EXAMPLE[x.dtype], get_num_threads())
    return x, residual


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2F] = (gate, up) side by side -> silu(gate) * up [T, F]."""
    rows, size = len(x), x.shape[1] // 2
    out = x.new_empty((rows, size))
    arguments = (x.data_ptr(), out.data_ptr(), rows, size, DTYPE_EXAMPLE[x.dtype])
    if rows * size <= SERIAL_ELEMENTS:
        _silu_and_mul_rows(*arguments, 0, rows)
    else:
        _silu_and_mul(*arguments, get_num_threads())
    return out


@njit(**COMPILED)
def norm_rope_store_rows(qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr,
                         slot_mapping, shape, num_heads, eps, example, start, stop):
    """Normalize and rotate q and k of qkv [T, H + 2K, D] in place, and store k and v in the cache.

    q_norm, k_norm [D], or 0 without a norm; cos, sin [T, D] of RotaryEmbedding; slot_mapping [T];
    `shape` [blocks, K, B, D] of the K cache and of the V cache.
    """
    _, num_kv_heads, block_size, dim = shape
    half, tokens = dim // 2, len(slot_mapping)
    qkv = array(qkv_ptr, (tokens, num_heads + 2 * num_kv_heads, dim), example)
    cos, sin = array(cos_ptr, (tokens, dim), example), array(sin_ptr, (tokens, dim), example)
    k_cache, v_cache = array(k_ptr, shape, example), array(v_ptr, shape, example)
    row = np.empty(dim, f32)
    for i in range(start, stop):
        block, offset = slot_mapping[i] // block_size, slot_mapping[i] % block_size
        for h in range(num_heads + num_kv_heads):
            x = qkv[i, h]
            for c in range(dim):
                row[c] = to_float32(x[c])
            weight_ptr = q_norm_ptr if h < num_heads else k_norm_ptr
            if weight_ptr != 0:
                weight = array(weight_ptr, (dim,), example)
                squares = f32(0)
                for c in range(dim):
                    squares += row[c] * row[c]
                scale = f32(1) / np.sqrt(squares / f32(dim) + f32(eps))
                for c in range(dim):
                    normed = to_float32(from_float32(row[c] * scale, example))
                    row[c] = to_float32(from_float32(normed * to_float32(weight[c]), example))
            for c in range(half):
                a, b, d = row[c], row[c + half], c + half
                x[c] = from_float32(a * to_float32(cos[i, c]) + b * to_float32(sin[i, c]), example)
                x[d] = from_float32(b * to_float32(cos[i, d]) + a * to_float32(sin[i, d]), example)
            if h >= num_heads:
                for c in range(dim):
                    k_cache[block, h - num_heads, offset, c] = x[c]
                    v_cache[block, h - num_heads, offset, c] = qkv[i, h + num_kv_heads, c]


@njit(parallel=True, **COMPILED)
def norm_rope_store(qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, slot_mapping,
                    shape, num_heads, eps, example, parts):
    for p in prange(parts):
        start, stop = p * len(slot_mapping) // parts, (p + 1) * len(slot_mapping) // parts
        norm_rope_store_rows(
            qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, slot_mapping, shape,
            num_heads, eps, example, start, stop)


# ---- attention of decode rows and of short chunks ----


class Packs(NamedTuple):
    """P packs of up to M queries that read the same blocks, each up to its own context length.

    Each K and V is read once per pack. A pack of three tokens of one sequence, with B = 4:

        block table   |       7       |       3       |       9       |
        tokens        | 0   1   2   3 | 4   5   6   7 | 8   9         |  context_lens
        query 20      | x   x   x   x | x   x   x   x |               |        8
        query 21      | x   x   x   x | x   x   x   x | x             |        9
        query 22      | x   x   x   x | x   x   x   x | x   x         |       10
    """

    # [P, M] int64, indices of the step's tokens, padded with -1. M * G <= MAX_PACK_ROWS, or M = 1.
    queries: Any
    # [P, M] int64, ascending and at least 1; and [P, blocks] int32.
    context_lens: Any
    block_tables: Any


class AttentionWork(NamedTuple):
    """Two passes, merged as in flash decoding (arXiv:2311.01282): prefixes, then the rest."""

    prefixes: Packs
    own: Packs
    # [T, H] float32, log-sum-exp of the scores of the prefix; minus infinity without a prefix.
    lse: Any


@njit(**COMPILED)
def kv_address(cache, block, head, slot):
    """The address of a token's K or V in cache [blocks, K, B, D]."""
    row = (np.int64(block) * cache.shape[1] + head) * cache.shape[2] + slot
    return np.int64(cache.ctypes.data) + row * cache.shape[3] * cache.itemsize


@njit(**COMPILED)
def count_queries(queries):
    count = 0
    while count < len(queries) and queries[count] >= 0:
        count += 1
    return count


@njit(**COMPILED)
def attend_packs(qkv, out, lse, k_cache, v_cache, packs, is_prefix, start, stop):
    """Compute attention for items [start, stop) of the K * P pairs of a KV head and a pack.

    qkv [T, H + 2K, D] and out [T, H, D] may have more rows; lse [T, H]. The prefix pass writes out
    and lse, and the other pass merges them into out. The rows of a pack are its queries times G
    heads. K and V are read once for two rows at a time; an odd last row is paired with zeros.
    """
    queries, context_lens, block_tables = packs
    block_size, dim, group = k_cache.shape[2], k_cache.shape[3], out.shape[1] // k_cache.shape[1]
    row_bytes, scale = dim * k_cache.itemsize, f32(1) / np.sqrt(f32(dim))
    # All packs of a KV head come before the next head, so that shared blocks stay in the caches.
    for item in range(start, stop):
        head, p = item // len(queries), item % len(queries)
        table, count = block_tables[p], count_queries(queries[p])
        rows, context_len = count * group, context_lens[p, count - 1]
        blocks = (context_len + block_size - 1) // block_size
        query = np.zeros((rows + rows % 2, dim), f32)
        acc = np.zeros_like(query)
        # Until the softmax, `weights` holds the scores.
        weights = np.empty((len(query), context_len), f32)
        for r in range(rows):
            q = qkv[queries[p, r // group], head * group + r % group]
            for d in range(dim):
                query[r, d] = to_float32(q[d]) * scale

        for i in range(blocks):
            block, ahead = table[i], table[min(i + PREFETCH_TILES, blocks - 1)]
            for j in range(min(block_size, context_len - i * block_size)):
                prefetch_range(kv_address(k_cache, ahead, head, j), row_bytes)
                for r in range(0, rows, 2):
                    a, b = f32(0), f32(0)
                    for d in range(dim):
                        k = to_float32(k_cache[block, head, j, d])
                        a += query[r, d] * k
                        b += query[r + 1, d] * k
                    weights[r, i * block_size + j] = a
                    weights[r + 1, i * block_size + j] = b

        row_sum = np.empty(rows, f32)
        for r in range(rows):
            token, h = queries[p, r // group], head * group + r % group
            visible = context_lens[p, r // group]
            prefix_lse = f32(-np.inf) if is_prefix else lse[token, h]
            row_max = max(prefix_lse, maximum(weights[r, :visible]))
            prefix_sum = exp(prefix_lse - row_max) if prefix_lse > -np.inf else f32(0)
            row_sum[r] = prefix_sum
            for t in range(visible):
                weight = exp(weights[r, t] - row_max)
                weights[r, t] = weight
                row_sum[r] += weight
            weights[r, visible:] = 0
            if prefix_sum > 0:
                for d in range(dim):
                    acc[r, d] = prefix_sum * to_float32(out[token, h, d])
            if is_prefix:
                lse[token, h] = row_max + np.log(row_sum[r])

        for i in range(blocks):
            block, ahead = table[i], table[min(i + PREFETCH_TILES, blocks - 1)]
            for j in range(min(block_size, context_len - i * block_size)):
                prefetch_range(kv_address(v_cache, ahead, head, j), row_bytes)
                for r in range(0, rows, 2):
                    a, b = weights[r, i * block_size + j], weights[r + 1, i * block_size + j]
                    for d in range(dim):
                        v = to_float32(v_cache[block, head, j, d])
                        acc[r, d] += a * v
                        acc[r + 1, d] += b * v

        for r in range(rows):
            result = out[queries[p, r // group], head * group + r % group]
            for d in range(dim):
                result[d] = from_float32(acc[r, d] / row_sum[r], k_cache[0, 0, 0, 0])


# The tiles of attend_packs_amx. Tiles 0 to 3 accumulate.
WEIGHTS, KV, QUERY, SCORES = 4, 5, 6, 7
# w V takes two tile rows for each row of a pack.
TILE_ROWS, MAX_PACK_ROWS = 16, 8


def fits_amx(group_size: int, block_size: int, head_dim: int) -> bool:
    """Whether attend_packs_amx supports these sizes."""
    return group_size <= MAX_PACK_ROWS and block_size % TILE_ROWS == 0 and head_dim % 32 == 0


@njit(**NO_NAN)
def attend_packs_amx(qkv, out, lse, k_cache, v_cache, packs, is_prefix, start, stop):
    """attend_packs in bfloat16 by AMX, with tiles of K and V as they are in the cache.

    scores = K q. A is 16 tokens by 32 dimensions of K, and B the same dimensions of the rows' q:

            dims 0  1   2  3                row 0   row 1               row 0   1
        token 0 [ k  k | k  k |     dims 0, 1 [ q  q | q  q |       token 0 [ s | s |
        token 1 [ k  k | k  k |  x       2, 3 [ q  q | q  q |   =   token 1 [ s | s |

    out = w V. B is 16 tokens by 32 dimensions of V. A pair in B is two dimensions of one token, but
    tile_dot expects two tokens of one dimension. Pairs (w, 0) therefore select the even dimensions,
    pairs (0, w) the odd ones, and each row of the pack takes two rows of A and C:

             token 0   1                 dims 0  1   2  3                  dims 0, 1   2, 3
        row 0  [ w  0 | w  0 |        token 0 [ v  v | v  v |      row 0, even [ o0  |  o2  |
        row 0  [ 0  w | 0  w |   x    token 1 [ v  v | v  v |   =  row 0, odd  [ o1  |  o3  |

    The weights are rounded before they are summed. As 0 times infinity is NaN, an infinity in V
    makes the other number of its pair NaN, and both in rows that do not attend to its token.
    """
    queries, context_lens, block_tables = packs
    block_size, dim, group = k_cache.shape[2], k_cache.shape[3], out.shape[1] // k_cache.shape[1]
    row_bytes, scale, columns = 2 * dim, f32(1) / np.sqrt(f32(dim)), dim // 32
    max_tiles, max_rows = block_tables.shape[1] * block_size // TILE_ROWS, queries.shape[1] * group
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
        head, p = item // len(queries), item % len(queries)
        table, count = block_tables[p], count_queries(queries[p])
        rows, context_len = count * group, context_lens[p, count - 1]
        tiles = (context_len + TILE_ROWS - 1) // TILE_ROWS
        for i in range(tiles):
            slot = i * TILE_ROWS
            tile_ptrs[i] = kv_address(k_cache, table[slot // block_size], head, slot % block_size)
            j = tiles + 1 + i if i < tiles - 1 else tiles
            tile_ptrs[j] = kv_address(v_cache, table[slot // block_size], head, slot % block_size)
        next_item = min(item + 1, stop - 1)
        for i in range(PREFETCH_TILES):
            slot = min(i, max_tiles - 1) * TILE_ROWS
            block = block_tables[next_item % len(queries), slot // block_size]
            tile_ptrs[2 * tiles + i] = kv_address(
                k_cache, block, next_item // len(queries), slot % block_size)

        # Tiles are 16 rows of 64 bytes, except where they depend on the number of rows in the pack.
        config[0], config[16:32:2], config[48:56] = 1, 64, TILE_ROWS
        config[48 : 48 + WEIGHTS + 1] = 2 * rows
        config[16 + 2 * QUERY] = config[16 + 2 * SCORES] = 4 * rows
        tile_config(config)
        for r in range(rows):
            q = qkv_pairs[queries[p, r // group], head * group + r % group]
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
            token, h = queries[p, r // group], head * group + r % group
            for t in range(context_lens[p, r // group], tiles * TILE_ROWS):
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
            for t in range(context_lens[p, r // group], tiles * TILE_ROWS):
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
        for c in range(0, columns, 4):
            acc_ptr, acc_bytes, remaining = acc[c].ctypes.data, 128 * max_rows, columns - c
            tile_load(0, acc_ptr, 64)
            if remaining > 1:
                tile_load(1, acc_ptr + acc_bytes, 64)
            if remaining > 2:
                tile_load(2, acc_ptr + 2 * acc_bytes, 64)
            if remaining > 3:
                tile_load(3, acc_ptr + 3 * acc_bytes, 64)
            for i in range(tiles):
                if c == 0:
                    prefetch_range(tile_ptrs[tiles + i + PREFETCH_TILES], TILE_ROWS * row_bytes)
                v_ptr = (tile_ptrs[tiles + i] if i else np.int64(tail.ctypes.data)) + 64 * c
                tile = i - 1 if i else tiles - 1
                tile_load(WEIGHTS, weights.ctypes.data + 64 * tile, 64 * (max_tiles | 1))
                tile_load(KV, v_ptr, row_bytes)
                tile_dot(0, WEIGHTS, KV)
                if remaining > 1:
                    tile_load(KV, v_ptr + 64, row_bytes)
                    tile_dot(1, WEIGHTS, KV)
                if remaining > 2:
                    tile_load(KV, v_ptr + 128, row_bytes)
                    tile_dot(2, WEIGHTS, KV)
                if remaining > 3:
                    tile_load(KV, v_ptr + 192, row_bytes)
                    tile_dot(3, WEIGHTS, KV)
            tile_store(0, acc_ptr, 64)
            if remaining > 1:
                tile_store(1, acc_ptr + acc_bytes, 64)
            if remaining > 2:
                tile_store(2, acc_ptr + 2 * acc_bytes, 64)
            if remaining > 3:
                tile_store(3, acc_ptr + 3 * acc_bytes, 64)
        for r in range(rows):
            result = out_pairs[queries[p, r // group], head * group + r % group]
            inv_sum = f32(1) / row_sum[r]
            for c in range(columns):
                even, odd, pair = acc[c, r], acc[c, rows + r], result[16 * c : 16 * c + 16]
                for d in range(16):
                    high = np.uint32(from_float32(odd[d] * inv_sum, BFLOAT16)) << np.uint32(16)
                    pair[d] = np.uint32(high | np.uint32(from_float32(even[d] * inv_sum, BFLOAT16)))
    tile_release()


def _attend_packs(use_amx, *arguments):
    """Call attend_packs_amx if use_amx is True, or attend_packs if it is None."""
    raise NotImplementedError("compiled code only")


# The type of use_amx selects the kernel, because without AMX LLVM cannot compile the other one.
@overload(_attend_packs)
def _select_attend_packs(use_amx, *arguments):
    if use_amx == types.none:
        return lambda use_amx, *arguments: attend_packs(*arguments)
    return lambda use_amx, *arguments: attend_packs_amx(*arguments)


@njit(parallel=True, **COMPILED)
def attend(qkv_ptr, rows, out_ptr, num_heads, k_ptr, v_ptr, shape, work, example, use_amx, parts):
    """Compute the AttentionWork `work`: qkv [rows, H + 2K, D] -> out [rows, H, D]."""
    num_kv_heads, dim = shape[1], shape[3]
    qkv = array(qkv_ptr, (rows, num_heads + 2 * num_kv_heads, dim), example)
    out = array(out_ptr, (rows, num_heads, dim), example)
    k_cache, v_cache = array(k_ptr, shape, example), array(v_ptr, shape, example)
    # In a parallel loop Numba supports plain tuples, but not named ones.
    (a, b, c), (d, e, f), lse = work
    prefixes, own = (a, b, c), (d, e, f)
    prefix_items, own_items = num_kv_heads * len(prefixes[0]), num_kv_heads * len(own[0])
    if prefix_items > 0:
        for p in prange(parts):
            start, stop = p * prefix_items // parts, (p + 1) * prefix_items // parts
            _attend_packs(use_amx, qkv, out, lse, k_cache, v_cache, prefixes, True, start, stop)
    for p in prange(parts):
        start, stop = p * own_items // parts, (p + 1) * own_items // parts
        _attend_packs(use_amx, qkv, out, lse, k_cache, v_cache, own, False, start, stop)


# ---- the layers of a decode step ----

# The columns of decode_layers' addresses; 0 means that the layer has no such weight.
(INPUT_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUTPUT, OUTPUT_BIAS, POST_ATTENTION_NORM, GATE_UP, DOWN,
 K_CACHE, V_CACHE) = range(12)


@njit(**COMPILED)
def linear_blocks(x_ptr, weight_ptr, bias_ptr, out_ptr, rows, inputs, outputs, start, stop):
    """out [rows, outputs] = x [rows, inputs] W^T + bias by AMX: blocks [start, stop) of 32 outputs.

    oneDNN packs W as [outputs / 32, inputs / 2, 32, 2], so that two tiles B are side by side:

        output          0      1    ..    15     16     17   ..    31
        inputs 0, 1 [ w  w | w  w | .. | w  w | w  w | w  w | .. | w  w ]
               2, 3 [ w  w | w  w | .. | w  w | w  w | w  w | .. | w  w ]
                 .. [         tile 6          |         tile 7          ]

    Tiles 4 and 5 are 32 inputs of two groups of rows of x. All groups have the same height, so the
    last one may start early and compute some rows again. Tiles 0 to 3 accumulate.
    """
    out = array(out_ptr, (rows, outputs // 32, 32), BFLOAT16)
    panels = (rows + 2 * TILE_ROWS - 1) // (2 * TILE_ROWS)
    two_tiles = rows > TILE_ROWS
    height = (rows + 2 * panels - 1) // (2 * panels) if two_tiles else rows
    config = np.zeros(64, np.uint8)
    config[0], config[16:32:2], config[48:54], config[54:56] = 1, 64, height, TILE_ROWS
    tile_config(config)
    acc = np.empty((2, height, 32), f32)
    acc_ptr, half_bytes, x_stride = np.int64(acc.ctypes.data), 128 * height, 2 * inputs
    bias = np.zeros(32, f32)
    for block in range(start, stop):
        if bias_ptr != 0:
            for c in range(32):
                bias[c] = to_float32(array(bias_ptr, (outputs,), BFLOAT16)[32 * block + c])
        for panel in range(panels):
            first = min(2 * panel * height, rows - height)
            second = min(first + height, rows - height)
            x0, x1 = x_ptr + first * x_stride, x_ptr + second * x_stride
            w = weight_ptr + block * 32 * x_stride
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
                if two_tiles:
                    tile_load(5, x1, x_stride)
                    tile_dot(2, 5, 6)
                    tile_dot(3, 5, 7)
                x0, x1, w = x0 + 64, x1 + 64, w + 2048
            tile_store(0, acc_ptr, 128)
            tile_store(1, acc_ptr + 64, 128)
            tile_store(2, acc_ptr + half_bytes, 128)
            tile_store(3, acc_ptr + half_bytes + 64, 128)
            for half in range(2 if two_tiles else 1):
                begin = second if half else first
                for i in range(height):
                    total, row = acc[half, i], out[begin + i, block]
                    for c in range(32):
                        row[c] = from_float32(total[c] + bias[c], BFLOAT16)
    tile_release()


@njit(parallel=True, **COMPILED)
def linear(x_ptr, weight_ptr, bias_ptr, out_ptr, rows, inputs, outputs, parts):
    blocks = outputs // 32
    for p in prange(parts):
        start, stop = p * blocks // parts, (p + 1) * blocks // parts
        linear_blocks(x_ptr, weight_ptr, bias_ptr, out_ptr, rows, inputs, outputs, start, stop)


@njit(**COMPILED)
def decode_layers(addresses, x_ptr, residual_ptr, rows, size, cos_ptr, sin_ptr, intermediate_size,
                  num_heads, eps, shape, slot_mapping, work, use_amx, parts):
    """Compute all layers of a decode step in bfloat16 by AMX, as models.qwen3.DecoderLayer does.

    addresses [layers, 12]; cos, sin [rows, D]. x and residual [rows, size] change in place: their
    sum is the embedding at first and the input of the final norm at the end.
    """
    _, num_kv_heads, _, dim = shape
    qkv_size, attn_size = (num_heads + 2 * num_kv_heads) * dim, num_heads * dim
    qkv, attn = np.empty((rows, qkv_size), np.uint16), np.empty((rows, attn_size), np.uint16)
    gate_up = np.empty((rows, 2 * intermediate_size), np.uint16)
    activated = np.empty((rows, intermediate_size), np.uint16)
    example, no_bias = BFLOAT16, np.int64(0)
    for i in range(len(addresses)):
        at = addresses[i]
        # They are read in the loop (see `instruction`). Without the cast from unsigned, Numba would
        # compile every kernel again for a second type of address.
        qkv_ptr, attn_ptr = np.int64(qkv.ctypes.data), np.int64(attn.ctypes.data)
        gate_up_ptr, activated_ptr = np.int64(gate_up.ctypes.data), np.int64(activated.ctypes.data)
        _add_rms_norm(x_ptr, residual_ptr, at[INPUT_NORM], rows, size, eps, example, parts)
        linear(x_ptr, at[QKV], at[QKV_BIAS], qkv_ptr, rows, size, qkv_size, parts)
        norm_rope_store(qkv_ptr, at[Q_NORM], at[K_NORM], cos_ptr, sin_ptr, at[K_CACHE], at[V_CACHE],
                        slot_mapping, shape, num_heads, eps, example, parts)
        attend(qkv_ptr, rows, attn_ptr, num_heads, at[K_CACHE], at[V_CACHE], shape, work, example,
               use_amx, parts)
        linear(attn_ptr, at[OUTPUT], at[OUTPUT_BIAS], x_ptr, rows, attn_size, size, parts)
        _add_rms_norm(x_ptr, residual_ptr, at[POST_ATTENTION_NORM], rows, size, eps, example, parts)
        linear(x_ptr, at[GATE_UP], no_bias, gate_up_ptr, rows, size, 2 * intermediate_size, parts)
        _silu_and_mul(gate_up_ptr, activated_ptr, rows, intermediate_size, example, parts)
        linear(activated_ptr, at[DOWN], no_bias, x_ptr, rows, intermediate_size, size, parts)


def compile_all(example, use_amx) -> None:
    """Compile all kernels for one dtype, or load them from the cache, by calls with no rows."""
    kernel = _add_rms_norm_rows
    compiled, loaded = len(kernel.signatures), len(kernel.stats.cache_hits)
    kernel(0, 0, 0, 0, 1, 0.0, example, 0, 0)
    if len(kernel.signatures) > compiled and len(kernel.stats.cache_hits) == loaded:
        kept = "and keeping them" if can_cache_code() else "not kept: set NUMBA_CACHE_DIR"
        logger.info(f"compiling the CPU kernels, which takes 20 to 40 s ({kept})")
    none, nones, shape = np.empty(0, np.int64), np.empty((0, 1), np.int64), (1, 1, 1, 2)
    _add_rms_norm(0, 0, 0, 0, 1, 0.0, example, 1)
    _silu_and_mul_rows(0, 0, 0, 1, example, 0, 0)
    _silu_and_mul(0, 0, 0, 1, example, 1)
    norm_rope_store_rows(0, 0, 0, 0, 0, 0, 0, none, shape, 1, 0.0, example, 0, 0)
    norm_rope_store(0, 0, 0, 0, 0, 0, 0, none, shape, 1, 0.0, example, 1)
    packs = Packs(nones, nones, nones.astype(np.int32))
    work = AttentionWork(packs, packs, np.empty((0, 1), f32))
    attend(0, 0, 0, 1, 0, 0, shape, work, example, use_amx, 1)
    if use_amx:
        addresses = np.empty((0, 12), np.int64)
        decode_layers(addresses, 0, 0, 0, 1, 0, 0, 1, 1, 0.0, shape, none, work, use_amx, 1)
