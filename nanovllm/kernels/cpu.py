"""The CPU's kernels, in Python that Numba compiles: what Triton's are to a GPU.

Owns: nothing. Given: addresses of contiguous memory. Mutates: what each kernel says.

Between two matrix products torch makes a dozen calls, and there a call costs 10 to 15 us whatever it
computes: the product has streamed its weights through the caches, so it starts cold. Here it is one
call, which goes over memory once. It is given addresses, because to make a Numba array of a tensor costs
more than many a kernel takes. Work on few rows is done by the calling thread alone; but where `layers`
calls, the others are awake: it is all layers of a decode step, products included, in one call.

bfloat16, which numpy does not know, is the upper half of a float32 and comes as uint16. `like` is a
number of the type that is stored: it picks the code. All arithmetic is in float32, and rounded where
torch rounds; but for rotary, where torch rounds once more.

The compiled code is kept in __pycache__, or where NUMBA_CACHE_DIR says. Numba compiles again when this
file changes, but not when another does: so what these kernels call stands here too.

Shapes: T tokens, P packs of M queries, H = K * G query heads that share K KV heads in groups of G,
D head size, B slots of a block.
"""

import ctypes
import logging
import platform
import sys
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import carray, get_num_threads, njit, prange, types
from numba.extending import intrinsic, overload
from torch import Tensor

from nanovllm.layers.norm import add_rms_norm as plain_add_rms_norm
from nanovllm.runner.batch import SamplingBatch
from nanovllm.runner.sampler import filtered

logger = logging.getLogger("nanovllm")


def keeps_code() -> bool:
    """Whether Numba finds a folder that it may write to; it refuses to decorate if not."""
    try:
        njit(cache=True)(keeps_code)
    except RuntimeError:
        return False
    return True


# Sums may be reordered and products fused; but NaN and infinity are what they are.
COMPILED: Any = dict(
    cache=keeps_code(),
    nogil=True,
    error_model="numpy",
    fastmath={"reassoc", "contract", "arcp", "nsz"},
)
# As if there were no NaN: only then is a maximum vector code.
NO_NAN: Any = COMPILED | {"fastmath": COMPILED["fastmath"] | {"nnan"}}
AHEAD = 2  # blocks, or tiles, that KV is fetched in advance: 27 -> 20 ms for 28 layers of 16 x 192 tokens
CACHE_LINE = 64  # bytes
CHUNK = 1024  # tokens of the vocabulary
COLDEST = np.float32(1.2e-38)  # a temperature that has a reciprocal
FEW = 1 << 17  # elements: with fewer the other threads are not woken; they are 10 us away

BFLOAT16 = np.uint16(0)
LIKE = {torch.bfloat16: BFLOAT16, torch.float32: np.float32(0)}  # how kernels know a dtype

f32 = np.float32


# ---- memory and numbers ----


@intrinsic
def pointer(typing, address, like):
    """address -> a pointer to numbers of `like`'s type"""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), generate


@intrinsic
def prefetch(typing, address):
    """Bring the cache line of this address near; nothing waits for it."""

    def generate(context, builder, signature, args):
        byte, i32, name = ir.IntType(8).as_pointer(), ir.IntType(32), "llvm.prefetch.p0"
        kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        to_read, keep, data = i32(0), i32(3), i32(1)
        builder.call(function, [builder.inttoptr(args[0], byte), to_read, keep, data])
        return context.get_dummy_value()

    return types.void(address), generate


@njit(**COMPILED)
def array(address, shape, like):
    return carray(pointer(address, like), shape)


def wide(x):
    """A stored number -> float32."""
    raise NotImplementedError("compiled code only")


@overload(wide)
def _wide(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


def narrow(x, like):
    """float32 -> a stored number: the nearest, of two the even one."""
    raise NotImplementedError("compiled code only")


@overload(narrow)
def _narrow(x, like):
    def to_bfloat16(x, like):
        bits = np.float32(x).view(np.uint32)
        even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return np.uint16((bits + even) >> np.uint32(16)) if x == x else np.uint16(0x7FC0)

    return to_bfloat16 if like == types.uint16 else lambda x, like: f32(x)


@njit(**COMPILED)
def exp(x):
    """e^x to 3e-7 of it, and 1e-7 |x| more; at most e^87 and at least e^-87. Loops of it become
    vectors, of libm's not.

    x / ln 2 = whole + part: 2^whole is a float's exponent, 2^part a polynomial (minimax on [0, 1)).
    """
    x = min(max(x * f32(1.44269504), f32(-126)), f32(126))
    whole = np.floor(x)
    part = x - whole
    power = f32(1.8775767e-3)
    power = power * part + f32(8.9893397e-3)
    power = power * part + f32(5.5826318e-2)
    power = power * part + f32(2.4015361e-1)
    power = power * part + f32(6.9315308e-1)
    power = power * part + f32(9.9999994e-1)
    return power * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


# ---- matrix units: Intel's AMX. Eight tiles, known by number, of up to 16 rows of up to 64 bytes ----


def has_matrix_units() -> bool:
    """Whether the processor has them for bfloat16, and the system lets this process use them."""
    named = numba.config.CPU_NAME or numba.config.CPU_FEATURES
    if named or sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    if not get_host_cpu_features().get("amx-bf16"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def instruction(name, kinds, operands):
    """What @intrinsic asks for. A tile's number is a part of its instruction: a literal.

    An address keeps no array: Numba lets go of one after the last line, or loop, that names it.
    """

    def generate(context, builder, signature, args):
        values, byte, full = [], ir.IntType(8), f"llvm.x86.{name}"
        for kind, operand, arg in zip(kinds.split(), operands, args, strict=True):
            if kind == "tile":
                values.append(byte(operand.literal_value))
            elif kind == "address":
                values.append(builder.inttoptr(arg, byte.as_pointer()))
            elif kind == "array":
                start = context.make_array(operand)(context, builder, arg).data
                values.append(builder.bitcast(start, byte.as_pointer()))
            else:
                values.append(context.cast(builder, arg, operand, types.int64))
        of = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        function = builder.module.globals.get(full) or ir.Function(builder.module, of, full)
        builder.call(function, values)
        return context.get_dummy_value()

    return types.void(*operands), generate


@intrinsic
def tile_shapes(typing, shapes):
    """uint8 [64]: 1; from the 16th on each tile's bytes of a row, in two; from the 48th on its rows."""
    return instruction("ldtilecfg", "array", (shapes,))


@intrinsic
def tile_release(typing):
    return instruction("tilerelease", "", ())


@intrinsic(prefer_literal=True)
def tile_clear(typing, tile):
    return instruction("tilezero", "tile", (tile,))


@intrinsic(prefer_literal=True)
def tile_load(typing, tile, address, stride):
    """From rows that begin `stride` bytes apart."""
    return instruction("tileloadd64", "tile address bytes", (tile, address, stride))


@intrinsic(prefer_literal=True)
def tile_store(typing, tile, address, stride):
    return instruction("tilestored64", "tile address bytes", (tile, address, stride))


@intrinsic(prefer_literal=True)
def tile_dot(typing, sums, a, b):
    """sums[m, n] += a[m, 2k] b[k, 2n] + a[m, 2k + 1] b[k, 2n + 1] for all k: bfloat16, to float32."""
    return instruction("tdpbf16ps", "tile tile tile", (sums, a, b))


# ---- between the matrix products: rows [start, stop), or all of them in parts ----


@njit(**COMPILED)
def _add_rms_norm_rows(x_at, residual_at, weight_at, rows, size, eps, like, start, stop):
    """residual += x; x = RMSNorm(residual) * weight. x, residual [rows, size]."""
    x, residual = array(x_at, (rows, size), like), array(residual_at, (rows, size), like)
    weight = array(weight_at, (size,), like)
    for i in range(start, stop):
        squares = f32(0)
        for c in range(size):
            total = narrow(wide(x[i, c]) + wide(residual[i, c]), like)
            residual[i, c] = total
            squares += wide(total) * wide(total)
        scale = f32(1) / np.sqrt(squares / f32(size) + f32(eps))
        for c in range(size):
            normed = narrow(wide(residual[i, c]) * scale, like)
            x[i, c] = narrow(wide(normed) * wide(weight[c]), like)


@njit(parallel=True, **COMPILED)
def _add_rms_norm(x_at, residual_at, weight_at, rows, size, eps, like, parts):
    for p in prange(parts):
        start, stop = p * rows // parts, (p + 1) * rows // parts
        _add_rms_norm_rows(x_at, residual_at, weight_at, rows, size, eps, like, start, stop)


@njit(**COMPILED)
def _silu_and_mul_rows(x_at, out_at, rows, size, like, start, stop):
    """out [rows, size] = silu(gate) * up, of x [rows, 2, size] = (gate, up)."""
    x, out = array(x_at, (rows, 2, size), like), array(out_at, (rows, size), like)
    for i in range(start, stop):
        for c in range(size):
            gate = wide(x[i, 0, c])
            opened = narrow(gate / (f32(1) + exp(-gate)), like)
            out[i, c] = narrow(wide(opened) * wide(x[i, 1, c]), like)


@njit(parallel=True, **COMPILED)
def _silu_and_mul(x_at, out_at, rows, size, like, parts):
    for p in prange(parts):
        start, stop = p * rows // parts, (p + 1) * rows // parts
        _silu_and_mul_rows(x_at, out_at, rows, size, like, start, stop)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(RMSNorm(x + residual) * weight, x + residual) in place: x and residual themselves. x [T, E]."""
    if residual is None:
        return plain_add_rms_norm(x, residual, weight, eps)
    rows, size = x.shape
    arguments = (
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), rows, size, eps, LIKE[x.dtype]
    )  # fmt: skip
    if rows * size <= FEW:
        _add_rms_norm_rows(*arguments, 0, rows)
    else:
        _add_rms_norm(*arguments, get_num_threads())
    return x, residual


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2F] = (gate, up) side by side -> silu(gate) * up [T, F]."""
    rows, size = len(x), x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype)
    arguments = (x.data_ptr(), out.data_ptr(), rows, size, LIKE[x.dtype])
    if rows * size <= FEW:
        _silu_and_mul_rows(*arguments, 0, rows)
    else:
        _silu_and_mul(*arguments, get_num_threads())
    return out


@njit(**COMPILED)
def turn_and_store_rows(
    qkv_at, q_weight, k_weight, cos_at, sin_at, k_at, v_at, slots, shape, heads, eps, like, start, stop
):  # fmt: skip
    """Norm and rotate q and k of qkv [T, H + 2K, D], where they are; k and v to the cache, too.

    The weights' addresses may be 0: no norm. cos, sin [T, D] as RotaryEmbedding.at gives them. The
    cache is of `shape` [blocks, K, B, D]; slots [T].
    """
    _, kv_heads, size, dim = shape
    half, total = dim // 2, len(slots)
    qkv = array(qkv_at, (total, heads + 2 * kv_heads, dim), like)
    cos, sin = array(cos_at, (total, dim), like), array(sin_at, (total, dim), like)
    k_cache, v_cache = array(k_at, shape, like), array(v_at, shape, like)
    row = np.empty(dim, f32)
    for i in range(start, stop):
        block, offset = slots[i] // size, slots[i] % size
        for h in range(heads + kv_heads):
            x = qkv[i, h]
            for c in range(dim):
                row[c] = wide(x[c])
            weight_at = q_weight if h < heads else k_weight
            if weight_at != 0:
                weight = array(weight_at, (dim,), like)
                squares = f32(0)
                for c in range(dim):
                    squares += row[c] * row[c]
                scale = f32(1) / np.sqrt(squares / f32(dim) + f32(eps))
                for c in range(dim):
                    normed = narrow(row[c] * scale, like)
                    row[c] = wide(narrow(wide(normed) * wide(weight[c]), like))
            for c in range(half):
                a, b, d = row[c], row[c + half], c + half
                x[c] = narrow(a * wide(cos[i, c]) + b * wide(sin[i, c]), like)
                x[d] = narrow(b * wide(cos[i, d]) + a * wide(sin[i, d]), like)
            if h >= heads:
                for c in range(dim):
                    k_cache[block, h - heads, offset, c] = x[c]
                    v_cache[block, h - heads, offset, c] = qkv[i, h + kv_heads, c]


@njit(parallel=True, **COMPILED)
def turn_and_store(
    qkv_at, q_weight, k_weight, cos_at, sin_at, k_at, v_at, slots, shape, heads, eps, like, parts
):  # fmt: skip
    for p in prange(parts):
        start, stop = p * len(slots) // parts, (p + 1) * len(slots) // parts
        turn_and_store_rows(
            qkv_at, q_weight, k_weight, cos_at, sin_at, k_at, v_at, slots, shape, heads, eps, like,
            start, stop,
        )  # fmt: skip


# ---- attention of decodes, and of short chunks ----


class Packs(NamedTuple):
    """P times up to M queries that read the same blocks, each as many tokens of them as it may see."""

    queries: Any  # [P, M] int64, of the step's tokens; -1: nobody. M * G is PACK at most, or G
    contexts: Any  # [P, M] int64, ascending; at least 1
    tables: Any  # [P, blocks] int32


class Reads(NamedTuple):
    """What the queries that are not torch's read: first with others a prefix, then tokens of their own."""

    prefixes: Packs
    own: Packs
    lse: Any  # [T, H] float32, the log of the prefix's sum of exponentials; minus infinity: no prefix


@njit(**COMPILED)
def place(cache, block, head, slot):
    """The address of a token's K or V."""
    row = (np.int64(block) * cache.shape[1] + head) * cache.shape[2] + slot
    return np.int64(cache.ctypes.data) + row * cache.shape[3] * cache.itemsize


@njit(**COMPILED)
def fetch(address, size):
    for line in range(0, size, CACHE_LINE):
        prefetch(address + line)


@njit(**NO_NAN)
def highest(row):
    """By 16 at a time: LLVM makes no vector code of a plain maximum."""
    tops, whole = np.full(16, row[0]), len(row) // 16 * 16
    for i in range(0, whole, 16):
        for c in range(16):
            tops[c] = max(tops[c], row[i + c])
    top = tops[0]
    for c in range(1, 16):
        top = max(top, tops[c])
    for i in range(whole, len(row)):
        top = max(top, row[i])
    return top


@njit(**COMPILED)
def readers(queries):
    count = 0
    while count < len(queries) and queries[count] >= 0:
        count += 1
    return count


@njit(**COMPILED)
def attend_packs(qkv, out, lse, k_cache, v_cache, packs, first, start, stop):
    """Each pack's queries over their tokens, for items [start, stop) of the K * P heads and packs.

    qkv [T, H + 2K, D]; out [T, H, D], both perhaps with more rows behind; lse [T, H]. If this is the
    `first` reading lse is written; else lse and out are what the first one found. K and V are read once,
    for two queries at a time: an odd last one has a companion of zeros.
    """
    queries, contexts, tables = packs
    size, dim, group = k_cache.shape[2], k_cache.shape[3], out.shape[1] // k_cache.shape[1]
    row, scale = dim * k_cache.itemsize, f32(1) / np.sqrt(f32(dim))
    for item in range(start, stop):
        head, p = item // len(queries), item % len(queries)
        table, count = tables[p], readers(queries[p])
        rows, context = count * group, contexts[p, count - 1]
        blocks = (context + size - 1) // size
        query = np.zeros((rows + rows % 2, dim), f32)
        found = np.zeros_like(query)
        weights = np.empty((len(query), context), f32)  # at first the scores
        for r in range(rows):
            of = qkv[queries[p, r // group], head * group + r % group]
            for d in range(dim):
                query[r, d] = wide(of[d]) * scale

        for i in range(blocks):
            block, ahead = table[i], table[min(i + AHEAD, blocks - 1)]
            for j in range(min(size, context - i * size)):
                fetch(place(k_cache, ahead, head, j), row)
                for r in range(0, rows, 2):
                    a, b = f32(0), f32(0)
                    for d in range(dim):
                        x = wide(k_cache[block, head, j, d])
                        a += query[r, d] * x
                        b += query[r + 1, d] * x
                    weights[r, i * size + j] = a
                    weights[r + 1, i * size + j] = b

        mass = np.empty(rows, f32)  # the sum of weights
        for r in range(rows):
            token, h = queries[p, r // group], head * group + r % group
            seen = contexts[p, r // group]
            known = f32(-np.inf) if first else lse[token, h]
            top = max(known, highest(weights[r, :seen]))
            before = exp(known - top) if known > -np.inf else f32(0)
            mass[r] = before
            for t in range(seen):
                weight = exp(weights[r, t] - top)
                weights[r, t] = weight
                mass[r] += weight
            weights[r, seen:] = 0
            if before > 0:
                for d in range(dim):
                    found[r, d] = before * wide(out[token, h, d])
            if first:
                lse[token, h] = top + np.log(mass[r])

        for i in range(blocks):
            block, ahead = table[i], table[min(i + AHEAD, blocks - 1)]
            for j in range(min(size, context - i * size)):
                fetch(place(v_cache, ahead, head, j), row)
                for r in range(0, rows, 2):
                    a, b = weights[r, i * size + j], weights[r + 1, i * size + j]
                    for d in range(dim):
                        x = wide(v_cache[block, head, j, d])
                        found[r, d] += a * x
                        found[r + 1, d] += b * x

        for r in range(rows):
            to = out[queries[p, r // group], head * group + r % group]
            for d in range(dim):
                to[d] = narrow(found[r, d] / mass[r], k_cache[0, 0, 0, 0])


WEIGHTS, KV, QUERY, SCORES = 4, 5, 6, 7  # tiles; 0 to 3 are sums
ROWS = 16  # of a tile
PACK = 8  # queries and heads at most that read together


def fits_tiles(group: int, size: int, dim: int) -> bool:
    """Whether attend_packs_in_tiles takes so many queries, slots of a block and dimensions."""
    return group <= PACK and size % ROWS == 0 and dim % 32 == 0


@njit(**NO_NAN)
def attend_packs_in_tiles(qkv, out, lse, k_cache, v_cache, packs, first, start, stop):
    """attend_packs in bfloat16 by the matrix units, which take K and V as they lie in the cache.

    K q: 16 tokens by 32 dimensions, times the queries in pairs of dimensions. w V: a tile of V, as the
    right operand, has pairs of dimensions where it should have pairs of tokens; so weights (w, 0) find
    the even dimensions of the sum and (0, w) the odd ones, and each query has a row of both. Weights are
    rounded to bfloat16, and so summed. An infinity in V spoils its pair, too, and so it does the pack's
    queries that do not see it: 0 times it is NaN.

    While a tile is computed one that comes later is fetched: of K, then of V, the last one first, then
    of the next item's K. What is allocated is used for all items, and named again where its address is
    used: see `instruction`.
    """
    queries, contexts, tables = packs
    size, dim, group = k_cache.shape[2], k_cache.shape[3], out.shape[1] // k_cache.shape[1]
    row, scale, columns = 2 * dim, f32(1) / np.sqrt(f32(dim)), dim // 32
    most, rows_most = tables.shape[1] * size // ROWS, queries.shape[1] * group
    coming = np.empty(2 * most + AHEAD, np.int64)  # addresses of 16 tokens' K or V
    shapes = np.zeros(64, np.uint8)
    query = np.empty(dim // 2 * rows_most, np.uint32)
    part = np.empty(ROWS * rows_most, f32)
    scores = np.empty((rows_most, most * ROWS), f32)
    # Rows of an odd number of lines, so that those of a tile do not compete for places in the cache.
    weights = np.empty((2 * rows_most, (most | 1) * ROWS), np.uint32)
    found = np.empty((columns, 2 * rows_most, 16), f32)
    mass = np.empty(rows_most, f32)
    last = np.empty((ROWS, dim), np.uint16)
    pairs = array(qkv.ctypes.data, (len(qkv), qkv.shape[1], dim // 2), np.uint32(0))
    out_pairs = array(out.ctypes.data, (len(out), out.shape[1], dim // 2), np.uint32(0))
    for item in range(start, stop):
        head, p = item // len(queries), item % len(queries)
        table, count = tables[p], readers(queries[p])
        rows, context = count * group, contexts[p, count - 1]
        tiles = (context + ROWS - 1) // ROWS
        for i in range(tiles):
            slot = i * ROWS
            coming[i] = place(k_cache, table[slot // size], head, slot % size)
            after = tiles + 1 + i if i < tiles - 1 else tiles
            coming[after] = place(v_cache, table[slot // size], head, slot % size)
        soon = min(item + 1, stop - 1)
        for i in range(AHEAD):
            slot = min(i, most - 1) * ROWS
            block = tables[soon % len(queries), slot // size]
            coming[2 * tiles + i] = place(k_cache, block, soon // len(queries), slot % size)

        shapes[0], shapes[16:32:2], shapes[48:56] = 1, 64, ROWS
        shapes[48 : 48 + WEIGHTS + 1] = 2 * rows
        shapes[16 + 2 * QUERY] = shapes[16 + 2 * SCORES] = 4 * rows
        tile_shapes(shapes)
        for r in range(rows):
            of = pairs[queries[p, r // group], head * group + r % group]
            for d in range(dim // 2):
                query[d * rows + r] = of[d]
        for i in range(tiles):
            tile_clear(SCORES)
            for c in range(columns):
                fetch(coming[i + AHEAD] + 32 * ROWS * 2 * c, 32 * ROWS * 2)
                tile_load(KV, coming[i] + 64 * c, row)
                tile_load(QUERY, query.ctypes.data + 64 * rows * c, 4 * rows)
                tile_dot(SCORES, KV, QUERY)
            tile_store(SCORES, part.ctypes.data, 4 * rows)
            for r in range(rows):
                for t in range(ROWS):
                    scores[r, i * ROWS + t] = part[t * rows + r] * scale

        for r in range(rows):
            token, h = queries[p, r // group], head * group + r % group
            for t in range(contexts[p, r // group], tiles * ROWS):
                scores[r, t] = -np.inf
            known = f32(-np.inf) if first else lse[token, h]
            top = max(known, highest(scores[r, : tiles * ROWS]))
            before = exp(known - top) if known > -np.inf else f32(0)
            total = before
            for t in range(tiles * ROWS):
                weight = np.uint32(narrow(exp(scores[r, t] - top), BFLOAT16))
                upper = np.uint32(weight << np.uint32(16))
                weights[r, t], weights[rows + r, t] = weight, upper
                total += upper.view(np.float32)
            for t in range(
                contexts[p, r // group], tiles * ROWS
            ):  # e^-87 of a huge V is not nothing
                weights[r, t], weights[rows + r, t] = np.uint32(0), np.uint32(0)
            mass[r] = total
            if first:
                lse[token, h] = top + np.log(total)
            for c in range(columns):
                for d in range(16):
                    pair = out_pairs[token, h, 16 * c + d] if before > 0 else np.uint32(0)
                    even = np.uint32(pair << np.uint32(16)).view(np.float32)
                    odd = np.uint32(pair & np.uint32(0xFFFF0000)).view(np.float32)
                    found[c, r, d], found[c, rows + r, d] = before * even, before * odd

        # What the cache holds behind the last token may be NaN, and that times 0 is NaN.
        stored = array(coming[tiles], (ROWS, dim), BFLOAT16)
        for t in range(ROWS):
            for d in range(dim):
                last[t, d] = stored[t, d] if t < context - (tiles - 1) * ROWS else np.uint16(0)
        for c in range(0, columns, 4):
            sums, size_of_sums, more = found[c].ctypes.data, 128 * rows_most, columns - c
            tile_load(0, sums, 64)
            if more > 1:
                tile_load(1, sums + size_of_sums, 64)
            if more > 2:
                tile_load(2, sums + 2 * size_of_sums, 64)
            if more > 3:
                tile_load(3, sums + 3 * size_of_sums, 64)
            for i in range(tiles):
                if c == 0:
                    fetch(coming[tiles + i + AHEAD], ROWS * row)
                at = (coming[tiles + i] if i else np.int64(last.ctypes.data)) + 64 * c
                tile = i - 1 if i else tiles - 1
                tile_load(WEIGHTS, weights.ctypes.data + 64 * tile, 64 * (most | 1))
                tile_load(KV, at, row)
                tile_dot(0, WEIGHTS, KV)
                if more > 1:
                    tile_load(KV, at + 64, row)
                    tile_dot(1, WEIGHTS, KV)
                if more > 2:
                    tile_load(KV, at + 128, row)
                    tile_dot(2, WEIGHTS, KV)
                if more > 3:
                    tile_load(KV, at + 192, row)
                    tile_dot(3, WEIGHTS, KV)
            tile_store(0, sums, 64)
            if more > 1:
                tile_store(1, sums + size_of_sums, 64)
            if more > 2:
                tile_store(2, sums + 2 * size_of_sums, 64)
            if more > 3:
                tile_store(3, sums + 3 * size_of_sums, 64)
        for r in range(rows):
            to = out_pairs[queries[p, r // group], head * group + r % group]
            share = f32(1) / mass[r]
            for c in range(columns):
                even, odd, pair = found[c, r], found[c, rows + r], to[16 * c : 16 * c + 16]
                for d in range(16):
                    upper = np.uint32(narrow(odd[d] * share, BFLOAT16)) << np.uint32(16)
                    pair[d] = np.uint32(upper | np.uint32(narrow(even[d] * share, BFLOAT16)))
    tile_release()


def attend_some(qkv, out, lse, k_cache, v_cache, packs, first, start, stop, in_tiles):
    """By attend_packs, or `in_tiles`, which is True or None: a type, because without matrix units the
    other is not to be compiled."""
    raise NotImplementedError("compiled code only")


@overload(attend_some)
def _attend_some(qkv, out, lse, k_cache, v_cache, packs, first, start, stop, in_tiles):
    def plain(qkv, out, lse, k_cache, v_cache, packs, first, start, stop, in_tiles):
        attend_packs(qkv, out, lse, k_cache, v_cache, packs, first, start, stop)

    def tiles(qkv, out, lse, k_cache, v_cache, packs, first, start, stop, in_tiles):
        attend_packs_in_tiles(qkv, out, lse, k_cache, v_cache, packs, first, start, stop)

    return plain if in_tiles == types.none else tiles


@njit(parallel=True, **COMPILED)
def attend(qkv_at, rows, out_at, heads, k_at, v_at, shape, reads, like, in_tiles, parts):
    """qkv [rows, (H + 2K) D], out [rows, H, D]: what `reads` has of the rows, the prefixes first.

    The packs of a KV head in turn, so that those which share blocks find them in the processor's cache.
    """
    kv_heads, dim = shape[1], shape[3]
    qkv = array(qkv_at, (rows, heads + 2 * kv_heads, dim), like)
    out = array(out_at, (rows, heads, dim), like)
    k_cache, v_cache = array(k_at, shape, like), array(v_at, shape, like)
    (a, b, c), (d, e, f), lse = reads
    prefixes, own = (a, b, c), (d, e, f)  # in a parallel loop Numba takes no tuple with names
    shared, alone = kv_heads * len(prefixes[0]), kv_heads * len(own[0])
    if shared > 0:
        for p in prange(parts):
            attend_some(
                qkv, out, lse, k_cache, v_cache, prefixes, True,
                p * shared // parts, (p + 1) * shared // parts, in_tiles,
            )  # fmt: skip
    for p in prange(parts):
        attend_some(
            qkv, out, lse, k_cache, v_cache, own, False,
            p * alone // parts, (p + 1) * alone // parts, in_tiles,
        )  # fmt: skip


# ---- the layers of a decode step ----

AHEAD_BYTES = 4096  # that weights are fetched in advance: 42 -> 36 ms for the layers of Qwen3-0.6B
# What `layers` is told of each layer, all addresses; 0: there is no such weight.
(
    ATTENTION_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, OUT_BIAS, MLP_NORM, GATE_UP, DOWN, K_CACHE,
    V_CACHE,
) = range(12)  # fmt: skip


@njit(**COMPILED)
def linear_blocks(x_at, weight_at, bias_at, out_at, rows, inputs, outputs, start, stop):
    """out [rows, outputs] = x [rows, inputs] W^T + bias: blocks [start, stop) of 32 outputs.

    W as oneDNN packs it, [outputs / 32, inputs / 2, 32, 2]: two tiles of 16 outputs side by side. Rows
    are taken in panels of two tiles; all tiles are of the same height, so the last may begin early and
    compute rows again. Tiles 4 and 5 are rows of x, 6 and 7 are outputs, 0 to 3 their sums.
    """
    out = array(out_at, (rows, outputs // 32, 32), BFLOAT16)
    panels = (rows + 2 * ROWS - 1) // (2 * ROWS)
    both = rows > ROWS
    height = (rows + 2 * panels - 1) // (2 * panels) if both else rows
    shapes = np.zeros(64, np.uint8)
    shapes[0], shapes[16:32:2], shapes[48:54], shapes[54:56] = 1, 64, height, ROWS
    tile_shapes(shapes)
    sums = np.empty((2, height, 32), f32)
    sums_at, half_size, line = np.int64(sums.ctypes.data), 128 * height, 2 * inputs
    bias = np.zeros(32, f32)
    for block in range(start, stop):
        if bias_at != 0:
            for c in range(32):
                bias[c] = wide(array(bias_at, (outputs,), BFLOAT16)[32 * block + c])
        for panel in range(panels):
            first = min(2 * panel * height, rows - height)
            second = min(first + height, rows - height)
            left, right = x_at + first * line, x_at + second * line
            at = weight_at + block * 32 * line
            tile_clear(0)
            tile_clear(1)
            tile_clear(2)
            tile_clear(3)
            for _ in range(inputs // 32):
                if panel == 0:
                    fetch(at + AHEAD_BYTES, 2048)
                tile_load(6, at, 128)
                tile_load(7, at + 64, 128)
                tile_load(4, left, line)
                tile_dot(0, 4, 6)
                tile_dot(1, 4, 7)
                if both:
                    tile_load(5, right, line)
                    tile_dot(2, 5, 6)
                    tile_dot(3, 5, 7)
                left, right, at = left + 64, right + 64, at + 2048
            tile_store(0, sums_at, 128)
            tile_store(1, sums_at + 64, 128)
            tile_store(2, sums_at + half_size, 128)
            tile_store(3, sums_at + half_size + 64, 128)
            for half in range(2 if both else 1):
                begin = second if half else first
                for i in range(height):
                    total, row = sums[half, i], out[begin + i, block]
                    for c in range(32):
                        row[c] = narrow(total[c] + bias[c], BFLOAT16)
    tile_release()


@njit(parallel=True, **COMPILED)
def linear(x_at, weight_at, bias_at, out_at, rows, inputs, outputs, parts):
    blocks = outputs // 32
    for p in prange(parts):
        start, stop = p * blocks // parts, (p + 1) * blocks // parts
        linear_blocks(x_at, weight_at, bias_at, out_at, rows, inputs, outputs, start, stop)


@njit(**COMPILED)
def layers(
    addresses, x_at, residual_at, rows, size, cos_at, sin_at, feed_forward, heads, eps, shape, slots,
    reads, in_tiles, parts,
):  # fmt: skip
    """All layers of a decode step, by the matrix units: what models.qwen3.Layer does.

    addresses [layers, 12]; x, residual [rows, size] in place: at first their sum is what was embedded, at
    last what the final norm takes. cos, sin [rows, D].
    """
    _, kv_heads, _, dim = shape
    width, found_width = (heads + 2 * kv_heads) * dim, heads * dim
    qkv, found = np.empty((rows, width), np.uint16), np.empty((rows, found_width), np.uint16)
    gate_up = np.empty((rows, 2 * feed_forward), np.uint16)
    opened = np.empty((rows, feed_forward), np.uint16)
    like, no_bias = BFLOAT16, np.int64(0)
    for i in range(len(addresses)):
        at = addresses[i]
        # In the loop: see `instruction`. Signed as other addresses are: else all is compiled again.
        qkv_at, found_at = np.int64(qkv.ctypes.data), np.int64(found.ctypes.data)
        gate_up_at, opened_at = np.int64(gate_up.ctypes.data), np.int64(opened.ctypes.data)
        _add_rms_norm(x_at, residual_at, at[ATTENTION_NORM], rows, size, eps, like, parts)
        linear(x_at, at[QKV], at[QKV_BIAS], qkv_at, rows, size, width, parts)
        turn_and_store(
            qkv_at, at[Q_NORM], at[K_NORM], cos_at, sin_at, at[K_CACHE], at[V_CACHE], slots, shape,
            heads, eps, like, parts,
        )  # fmt: skip
        attend(
            qkv_at, rows, found_at, heads, at[K_CACHE], at[V_CACHE], shape, reads, like, in_tiles,
            parts,
        )  # fmt: skip
        linear(found_at, at[OUT], at[OUT_BIAS], x_at, rows, found_width, size, parts)
        _add_rms_norm(x_at, residual_at, at[MLP_NORM], rows, size, eps, like, parts)
        linear(x_at, at[GATE_UP], no_bias, gate_up_at, rows, size, 2 * feed_forward, parts)
        _silu_and_mul(gate_up_at, opened_at, rows, feed_forward, like, parts)
        linear(opened_at, at[DOWN], no_bias, x_at, rows, feed_forward, size, parts)


# ---- sampling ----


@njit(**COMPILED)
def uniform(seed, position):
    """In [0, 1): the number that nanovllm.runner.sampler.uniform gives."""
    gamma = np.uint64(0x9E3779B97F4A7C15)
    z = np.uint64(seed) + np.uint64(position) * gamma
    for step in range(2):
        z += np.uint64(step) * gamma
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * 2.0**-53


@njit(**COMPILED)
def _weigh(logits, top, temperature, weights):
    """weights = e^((logits - top) / temperature), 0 where that is no float; their sum."""
    total, temperature = f32(0), max(temperature, COLDEST)
    for i in range(len(logits)):
        power = (wide(logits[i]) - top) / temperature
        weight = exp(power) if power > f32(-87) else f32(0)
        weights[i] = weight
        total += weight
    return total


@njit(**COMPILED)
def _passes(weights, target):
    """The first place where the sum of weights exceeds the target, and what was before it; a place
    of weight 0 is never given, unless there is no other."""
    place, before, total = 0, 0.0, 0.0
    for i in range(len(weights)):
        if weights[i] > 0:
            place, before = i, total
            total += weights[i]
            if total > target:
                break
    return place, before


@njit(parallel=True, **COMPILED)
def _draw(logits_at, rows, size, temperatures, seeds, positions, tokens, like):
    """tokens [rows], of logits [rows, size]. Read once: each chunk is weighed by its own maximum."""
    logits = array(logits_at, (rows, size), like)
    chunks = (size + CHUNK - 1) // CHUNK
    tops, sums = np.empty((rows, chunks), f32), np.zeros((rows, chunks), f32)
    for item in prange(rows * chunks):
        row, chunk = item // chunks, item % chunks
        part = logits[row, chunk * CHUNK : (chunk + 1) * CHUNK]
        weights = np.empty(len(part), f32)
        for i in range(len(part)):
            weights[i] = wide(part[i])
        top = highest(weights)
        tops[row, chunk] = top
        if temperatures[row] > 0 and top > -np.inf:
            sums[row, chunk] = _weigh(part, top, temperatures[row], weights)
    for row in prange(rows):
        top, heat = highest(tops[row]), temperatures[row]
        weights = np.zeros(CHUNK, f32)
        if heat > 0:
            scales = np.empty(chunks, f32)
            total = 0.0
            for chunk in range(chunks):
                power = (tops[row, chunk] - top) / max(heat, COLDEST)
                scales[chunk] = sums[row, chunk] * exp(power) if power > f32(-87) else f32(0)
                total += scales[chunk]
            target = uniform(seeds[row], positions[row]) * total
            chunk, before = _passes(scales, target)
            part = logits[row, chunk * CHUNK : (chunk + 1) * CHUNK]
            _weigh(part, top, heat, weights)
            place, _ = _passes(weights, target - before)
        else:
            chunk = 0
            while chunk < chunks - 1 and tops[row, chunk] != top:
                chunk += 1
            part = logits[row, chunk * CHUNK : (chunk + 1) * CHUNK]
            place = 0
            while place < len(part) - 1 and wide(part[place]) != top:
                place += 1
        tokens[row] = chunk * CHUNK + place


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits [R, V] -> token ids [R] int64: filters by torch, the draw in one pass."""
    temperature = batch.temperature
    if batch.filters and not batch.all_greedy:
        drawn = temperature > 0
        logits = filtered(logits, torch.where(drawn, temperature, 1.0)[:, None], batch)
        temperature = drawn.float()
    tokens = np.empty(len(logits), np.int64)
    numbers = (x.numpy() for x in (temperature, batch.seeds, batch.positions))
    _draw(logits.data_ptr(), *logits.shape, *numbers, tokens, LIKE[logits.dtype])
    return torch.from_numpy(tokens)


def compile_all(like, in_tiles) -> None:
    """For one type: compile, or read what an earlier process compiled. Computes nothing."""
    kernel = _add_rms_norm_rows
    known, read = len(kernel.signatures), len(kernel.stats.cache_hits)
    kernel(0, 0, 0, 0, 1, 0.0, like, 0, 0)
    if len(kernel.signatures) > known and len(kernel.stats.cache_hits) == read:
        logger.info("compiling the CPU's kernels for the first time, which takes 10 to 20 s")
    none, nones, shape = np.empty(0, np.int64), np.empty((0, 1), np.int64), (1, 1, 1, 2)
    _add_rms_norm(0, 0, 0, 0, 1, 0.0, like, 1)
    _silu_and_mul_rows(0, 0, 0, 1, like, 0, 0)
    _silu_and_mul(0, 0, 0, 1, like, 1)
    turn_and_store_rows(0, 0, 0, 0, 0, 0, 0, none, shape, 1, 0.0, like, 0, 0)
    turn_and_store(0, 0, 0, 0, 0, 0, 0, none, shape, 1, 0.0, like, 1)
    for kind in (like, f32(0)):  # logits that rules have changed are float32
        _draw(0, 0, 1, np.empty(0, f32), none, none, none, kind)
    packs = Packs(nones, nones, nones.astype(np.int32))
    reads = Reads(packs, packs, np.empty((0, 1), f32))
    attend(0, 0, 0, 1, 0, 0, shape, reads, like, in_tiles, 1)
    if in_tiles:
        addresses = np.empty((0, 12), np.int64)
        layers(addresses, 0, 0, 0, 1, 0, 0, 1, 1, 0.0, shape, none, reads, in_tiles, 1)
