"""CPU kernels in Python that Numba compiles, as Triton compiles those for a GPU.

A kernel changes only the memory that its docstring names. It takes the addresses of contiguous
tensors, because making a Numba array from a tensor takes longer than many kernels run.

Between two matrix products PyTorch makes about twelve calls of 10 to 15 us each, whatever they
compute, because the product has filled the caches with its weights. Here they are one kernel that
reads its input once. cpu/amx.py and cpu/avx512.py have what only some processors can run.

NumPy has no bfloat16, so it is stored as uint16, the upper half of a float32. The type of the
argument `example` selects the stored dtype, and that of `cache_example` the dtype of the KV cache,
where uint8 is fp8. Arithmetic is in float32. Results are rounded where PyTorch rounds, except in
the rotary embedding, where PyTorch also rounds each product.

Shapes: T tokens, P packs of M queries, H = K * G query heads that share K KV heads in groups of G,
D head size, B slots per block, E hidden size, F intermediate size, R rows of logits, V vocabulary.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, get_num_threads, prange, types
from numba.extending import intrinsic, overload
from torch import Tensor

from nanovllm.cpu.jit import compiled
from nanovllm.cpu.vectors import LANES, add_two, score_two
from nanovllm.models.fp8 import FP8
from nanovllm.models.layers import add_rms_norm as plain_add_rms_norm

# Prefetch distance of KV, in tiles of 16 tokens or (in attend_packs) of a block: 28 layers of
# attention over 16 x 192 tokens take 20 ms instead of 27 ms.
PREFETCH_TILES = 2
CACHE_LINE = 64  # bytes
# The calling thread computes up to this many elements alone, because waking others takes 10 us.
SERIAL_ELEMENTS = 1 << 17
# The most rows of a pack of several queries: with AMX each takes two of a tile's 16.
MAX_PACK_ROWS = 8

BFLOAT16 = np.uint16(0)
DTYPE_EXAMPLE = {torch.bfloat16: BFLOAT16, torch.float32: np.float32(0), FP8: np.uint8(0)}

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


@intrinsic
def half_to_float32(typing, bits):
    """Convert a float16, given as uint16."""

    def generate(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@compiled()
def array(address, shape, example):
    return carray(pointer(address, example), shape)


def to_float32(x):
    """Convert a stored number to float32."""
    raise NotImplementedError("compiled code only")


@overload(to_float32)
def _to_float32(x):
    def from_fp8(x):
        # By float16, which the processor converts: it has the same order of fields, one more bit of
        # exponent (0 here) and seven more of mantissa, and its exponent means 2^8 less.
        bits = np.int16((np.int16(np.int8(x)) << np.int16(7)) & np.int16(~0x4000))
        is_nan = (bits & np.int16(0x3F80)) == np.int16(0x3F80)
        bits = np.int16(bits | np.int16(0x7E00)) if is_nan else bits
        return half_to_float32(np.uint16(bits)) * f32(256)

    if x == types.uint8:
        return from_fp8
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


def from_float32(x, example):
    """Round float32 to a stored number: to the nearest, ties to even; in fp8 at most 448."""
    raise NotImplementedError("compiled code only")


@overload(from_float32)
def _from_float32(x, example):
    def to_bfloat16(x, example):
        bits = np.float32(x).view(np.uint32)
        rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return np.uint16((bits + rounding) >> np.uint32(16)) if x == x else np.uint16(0x7FC0)

    def to_fp8(x, example):
        size = np.float32(min(abs(np.float32(x)), f32(448)))
        bits = size.view(np.uint32)
        rounding = np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))
        normal = ((bits + rounding) >> np.uint32(20)) - np.uint32(120 << 3)
        # In a float32 near 2^14 the lowest bit is 2^-9, the unit of subnormal numbers.
        subnormal = np.float32(size + f32(2**14)).view(np.uint32) & np.uint32(0xF)
        code = normal if size >= f32(2**-6) else subnormal
        code = code if x == x else np.uint32(0x7F)
        return np.uint8(code | ((np.float32(x).view(np.uint32) >> np.uint32(24)) & np.uint32(0x80)))

    if example == types.uint8:
        return to_fp8
    return to_bfloat16 if example == types.uint16 else lambda x, example: f32(x)


def store_in_cache(x, cache, scale, example):
    """Write x [D] to cache [D]. In fp8, of x / scale; x becomes what the cache then holds."""
    raise NotImplementedError("compiled code only")


@overload(store_in_cache)
def _store_in_cache(x, cache, scale, example):
    def store_fp8(x, cache, scale, example):
        for c in range(len(x)):
            cache[c] = from_float32(to_float32(x[c]) / scale, cache[c])
            x[c] = from_float32(to_float32(cache[c]), example)

    def store(x, cache, scale, example):
        for c in range(len(x)):
            cache[c] = x[c]

    return store_fp8 if cache.dtype == types.uint8 else store


@compiled()
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


@compiled(no_nan=True)
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


@compiled(no_nan=True)
def maximum(x):
    return maximum_in(x, np.empty(16, x.dtype))


@compiled()
def prefetch_range(address, size):
    for offset in range(0, size, CACHE_LINE):
        prefetch(address + offset)


# ---- between the matrix products ----
#
# Kernels named ..._rows compute rows [start, stop). Parallel ones divide all rows into `parts`.


@compiled()
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


@compiled(parallel=True)
def _add_rms_norm(x_ptr, residual_ptr, weight_ptr, rows, size, eps, example, parts):
    for p in prange(parts):
        start, stop = p * rows // parts, (p + 1) * rows // parts
        _add_rms_norm_rows(x_ptr, residual_ptr, weight_ptr, rows, size, eps, example, start, stop)


@compiled()
def _silu_and_mul_rows(x_ptr, out_ptr, rows, size, example, start, stop):
    """out [rows, size] = silu(gate) * up, where x [rows, 2, size] = (gate, up)."""
    x, out = array(x_ptr, (rows, 2, size), example), array(out_ptr, (rows, size), example)
    for i in range(start, stop):
        for c in range(size):
            gate = to_float32(x[i, 0, c])
            activated = from_float32(gate / (f32(1) + exp(-gate)), example)
            out[i, c] = from_float32(to_float32(activated) * to_float32(x[i, 1, c]), example)


@compiled(parallel=True)
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


@compiled()
def norm_rope_store_rows(qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr,
                         slot_mapping, shape, num_heads, eps, example, cache_example, scales,
                         start, stop):
    """Normalize and rotate q and k of qkv [T, H + 2K, D] in place, and store k and v in the cache.

    q_norm, k_norm [D], or 0 without a norm; cos, sin [T, D] of RotaryEmbedding; slot_mapping [T];
    `shape` [blocks, K, B, D] of the K cache and of the V cache. `scales` (of k, of v) are 1 unless
    the cache is in fp8. Then q is multiplied by the scale of k, so that attention needs none for
    k, and the k and v of qkv are replaced by what the cache holds.
    """
    _, num_kv_heads, block_size, dim = shape
    half, tokens = dim // 2, len(slot_mapping)
    qkv = array(qkv_ptr, (tokens, num_heads + 2 * num_kv_heads, dim), example)
    cos, sin = array(cos_ptr, (tokens, dim), example), array(sin_ptr, (tokens, dim), example)
    k_cache, v_cache = array(k_ptr, shape, cache_example), array(v_ptr, shape, cache_example)
    row, (k_scale, v_scale) = np.empty(dim, f32), scales
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
            if h < num_heads and k_scale != 1:
                for c in range(dim):
                    row[c] *= f32(k_scale)
            for c in range(half):
                a, b, d = row[c], row[c + half], c + half
                x[c] = from_float32(a * to_float32(cos[i, c]) + b * to_float32(sin[i, c]), example)
                x[d] = from_float32(b * to_float32(cos[i, d]) + a * to_float32(sin[i, d]), example)
            if h >= num_heads:
                head = h - num_heads
                store_in_cache(x, k_cache[block, head, offset], f32(k_scale), example)
                v = qkv[i, h + num_kv_heads]
                store_in_cache(v, v_cache[block, head, offset], f32(v_scale), example)


@compiled(parallel=True)
def norm_rope_store(qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, slot_mapping,
                    shape, num_heads, eps, example, cache_example, scales, parts):
    for p in prange(parts):
        start, stop = p * len(slot_mapping) // parts, (p + 1) * len(slot_mapping) // parts
        norm_rope_store_rows(
            qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, slot_mapping, shape,
            num_heads, eps, example, cache_example, scales, start, stop)


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


@compiled()
def kv_address(cache, block, head, slot):
    """The address of a token's K or V in cache [blocks, K, B, D]."""
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
    """The address of a tile, the tokens of a block and a head, and that of a later one."""
    later = min(tile + PREFETCH_TILES, tiles - 1)
    here = kv_address(cache, table[tile // heads], first_head + tile % heads, 0)
    return here, kv_address(cache, table[later // heads], first_head + later % heads, 0)


@compiled()
def address_of(x, i, j):
    """The address of x[i, j] in an array of float32."""
    return np.int64(x.ctypes.data) + 4 * (i * x.shape[1] + j)


@compiled()
def attend_packs(qkv, out, lse, k_cache, v_cache, packs, is_prefix, start, stop):
    """Compute attention for items [start, stop) of the P * K pairs of a pack and a KV head.

    qkv [T, H + 2K, D] and out [T, H, D] may have more rows; lse [T, H]. The prefix pass writes out
    and lse, and the other pass merges them into out. The rows of a pack are its queries times G
    heads. All items of a pack are computed together, so that the cache is read as it lies in
    memory: blocks, then heads, then tokens. An odd last row is paired with zeros.
    """
    queries, context_lens, block_tables = packs
    _, num_kv_heads, block_size, dim = k_cache.shape
    group, wide = out.shape[1] // num_kv_heads, (dim + LANES - 1) // LANES * LANES
    scale, example = f32(1) / np.sqrt(f32(dim)), k_cache[0, 0, 0, 0]
    item = start
    while item < stop:
        p, first_head = item // num_kv_heads, item % num_kv_heads
        heads = min(num_kv_heads - first_head, stop - item)
        item += heads
        table, count = block_tables[p], count_queries(queries[p])
        rows, context_len = count * group, context_lens[p, count - 1]
        height, tiles = rows + rows % 2, (context_len + block_size - 1) // block_size * heads
        query, acc = np.zeros((heads * height, wide), f32), np.zeros((heads * height, wide), f32)
        # Until the softmax, `weights` holds the scores.
        weights, row_sum = np.empty((heads * height, context_len), f32), np.empty(heads * height, f32)
        for h in range(heads):
            for r in range(rows):
                q = qkv[queries[p, r // group], (first_head + h) * group + r % group]
                for d in range(dim):
                    query[h * height + r, d] = to_float32(q[d]) * scale

        for tile in range(tiles):
            i, h = tile // heads, tile % heads
            keys, ahead = tile_addresses(k_cache, table, first_head, heads, tile, tiles)
            tokens = min(block_size, context_len - i * block_size)
            for r in range(h * height, (h + 1) * height, 2):
                scores = address_of(weights, r, i * block_size)
                score_two(address_of(query, r, 0), keys, ahead, tokens, dim, scores, context_len,
                          example)

        for h in range(heads):
            for r in range(rows):
                token, q_head = queries[p, r // group], (first_head + h) * group + r % group
                row, visible = weights[h * height + r], context_lens[p, r // group]
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
                add_two(address_of(weights, r, i * block_size), context_len, values, ahead, tokens,
                        dim, address_of(acc, r, 0), example)

        for h in range(heads):
            for r in range(rows):
                result = out[queries[p, r // group], (first_head + h) * group + r % group]
                for d in range(dim):
                    number = acc[h * height + r, d] / row_sum[h * height + r]
                    result[d] = from_float32(number, qkv[0, 0, 0])


def select_attend_packs(unit, *arguments):
    """Call attend_packs if unit is None, or the kernel of cpu/amx.py if it is amx.UNIT, or that of
    cpu/avx512.py if it is avx512.UNIT. The unit is what the processor multiplies bfloat16 with.
    """
    raise NotImplementedError("compiled code only")


# The type of unit selects the kernel, because LLVM compiles the others for their processors only.
@overload(select_attend_packs)
def _attend_packs_without_amx(unit, *arguments):
    chosen = unit == types.none
    return (lambda unit, *arguments: attend_packs(*arguments)) if chosen else None


@compiled(parallel=True)
def attend(qkv_ptr, rows, out_ptr, num_heads, k_ptr, v_ptr, shape, work, example, cache_example,
           unit, parts):
    """Compute the AttentionWork `work`: qkv [rows, H + 2K, D] -> out [rows, H, D]."""
    num_kv_heads, dim = shape[1], shape[3]
    qkv = array(qkv_ptr, (rows, num_heads + 2 * num_kv_heads, dim), example)
    out = array(out_ptr, (rows, num_heads, dim), example)
    k_cache, v_cache = array(k_ptr, shape, cache_example), array(v_ptr, shape, cache_example)
    # In a parallel loop Numba supports plain tuples, but not named ones.
    (a, b, c), (d, e, f), lse = work
    # One parallel loop for both passes: LLVM compiles all that a loop calls again for each of them.
    for is_prefix in (True, False):
        packs = (a, b, c) if is_prefix else (d, e, f)
        items = num_kv_heads * len(packs[0])
        if items > 0:
            for p in prange(parts):
                start, stop = p * items // parts, (p + 1) * items // parts
                select_attend_packs(
                    unit, qkv, out, lse, k_cache, v_cache, packs, is_prefix, start, stop)
