"""Vectors of 16 numbers in LLVM code, for any processor."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.backends.cpu.kernels.llvm.emit import (
    BYTE,
    FLOAT,
    INT,
    INT16,
    INT32,
    call,
    element,
    stored_to_float32,
    without_result,
)

LANES = 16
SEGMENT = 128  # keys
# A polynomial that approximates 2^x on [0, 1), from the highest power on; see primitives.exp.
EXP2 = 1.8701225e-3, 9.0106837e-3, 5.5804454e-2, 2.4016321e-1, 6.9315141e-1, 1.0
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT32, LANES)
SHORTS = ir.VectorType(INT16, LANES)
# A product may be fused with a sum, and the lanes of a vector are added in any order.
FUSED, REDUCED = ("contract",), ("contract", "reassoc", "nsz")


def copies(builder, number, lanes=LANES):
    """Return a vector of `lanes` times the same number."""
    first = builder.insert_element(
        ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined), number, INT32(0)
    )
    order = ir.Constant(ir.VectorType(INT32, lanes), None)
    return builder.shuffle_vector(first, first, order)


@intrinsic
def copy_words(typing, source, source_stride, out, out_stride, rows, columns, example):
    """Copy words of 4 bytes, source [rows, columns] to out, where columns is a multiple of 16.

    uint8 in the source is fp8, and becomes float32. source and out are addresses, and the strides
    are the bytes between rows.
    """
    size = 1 if example == types.uint8 else 4
    kind = ir.VectorType(BYTE if size == 1 else FLOAT, LANES)

    def emit(builder, source, source_stride, out, out_stride, rows, columns, _):
        with cgutils.for_range(builder, rows) as row:
            first = builder.add(source, builder.mul(row.index, source_stride))
            to = builder.add(out, builder.mul(row.index, out_stride))
            with cgutils.for_range_slice(builder, INT(0), columns, INT(LANES)) as (column, _count):
                words = builder.load(element(builder, first, column, size, kind), align=size)
                place = element(builder, to, column, 4, FLOATS)
                builder.store(stored_to_float32(builder, words), place, align=4)

    return types.void(*[types.int64] * 6, example), without_result(emit)


def exp2_vector(builder, x):
    """Return 2^x of a vector for x <= 0, clamped to -126; see primitives.exp."""

    def constant(number):
        return ir.Constant(FLOATS, [number] * LANES)

    lowest = constant(-126.0)
    x = builder.select(builder.fcmp_ordered(">", x, lowest), x, lowest)
    n = call(builder, "floor.v16f32", FLOATS, x)
    part = builder.fsub(x, n)
    power = constant(EXP2[0])
    for number in EXP2[1:]:
        product = builder.fmul(power, part, flags=FUSED)
        power = builder.fadd(product, constant(number), flags=FUSED)
    exponent = builder.add(builder.fptosi(n, INTS), ir.Constant(INTS, [127] * LANES))
    exponent = builder.shl(exponent, ir.Constant(INTS, [23] * LANES))
    return builder.fmul(power, builder.bitcast(exponent, FLOATS))


@intrinsic
def weigh_rows(typing, rows, scores, weights, oldest, visible, first, row_max, row_sum, factors,
               scale, example):
    """Turn scores [rows, SEGMENT] of a segment into weights [rows, SEGMENT] of its keys.

    All arguments but rows, first, scale and example are addresses. Of the keys from `first` on, row
    r attends to those from oldest [r] to visible [r], which are int64 and the second one excluded.
    weight = exp2(score * scale - maximum), and 0 for other keys. The maxima and the sums of weights
    in row_max and row_sum [rows] go on; factors [rows] are what earlier weights are multiplied by.
    Weights are float32, or bfloat16 for pairs.
    """
    is_pair = example == types.uint16
    itemsize = 2 if is_pair else 4
    vectors = range(SEGMENT // LANES)

    def emit(builder, rows, scores, weights, oldest, visible, first, row_max, row_sum, factors,
             scale, _):
        scales = copies(builder, scale)
        least = ir.Constant(FLOATS, [-float("inf")] * LANES)
        zero = ir.Constant(FLOATS, None)

        def larger(a, b):
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        with cgutils.for_range(builder, rows) as loop:
            row = loop.index
            places = [element(builder, array, row, 4, FLOAT)
                      for array in (row_max, row_sum, factors)]
            old = builder.load(places[0])
            hidden, seen = [
                copies(builder, builder.trunc(builder.sub(key, first), INT32))
                for key in [builder.load(element(builder, array, row, 8, INT))
                            for array in (oldest, visible)]
            ]
            at = builder.mul(row, INT(SEGMENT))
            masks = []
            scaled = []
            top = copies(builder, old)
            for v in vectors:
                lanes = ir.Constant(INTS, [*range(LANES * v, LANES * (v + 1))])
                masks.append(builder.and_(builder.icmp_signed(">=", lanes, hidden),
                                          builder.icmp_signed("<", lanes, seen)))
                place = element(builder, scores, builder.add(at, INT(LANES * v)), 4, FLOATS)
                score = builder.fmul(builder.load(place, align=4), scales)
                scaled.append(builder.select(masks[v], score, least))
                top = larger(top, scaled[v])
            for half in (8, 4, 2, 1):
                order = [(i + half) % LANES for i in range(LANES)]
                turned = builder.shuffle_vector(top, top, ir.Constant(INTS, order))
                top = larger(top, turned)
            total = None
            for v in vectors:
                weight = exp2_vector(builder, builder.fsub(scaled[v], top))
                weight = builder.select(masks[v], weight, zero)
                total = weight if total is None else builder.fadd(total, weight)
                stored = to_bfloat16(builder, weight) if is_pair else weight
                number = builder.add(at, INT(LANES * v))
                place = element(builder, weights, number, itemsize, stored.type)
                builder.store(stored, place, align=itemsize)
            factor = exp2_vector(builder, builder.fsub(copies(builder, old), top))
            factor = builder.extract_element(factor, INT32(0))
            total = call(builder, "vector.reduce.fadd.v16f32", FLOAT, FLOAT(0.0), total,
                         fastmath=REDUCED)
            before = builder.fmul(builder.load(places[1]), factor, flags=FUSED)
            builder.store(builder.extract_element(top, INT32(0)), places[0])
            builder.store(builder.fadd(before, total, flags=FUSED), places[1])
            builder.store(factor, places[2])

    numbers = [types.int64] * 9
    return types.void(*numbers, types.float32, example), without_result(emit)


def to_bfloat16(builder, x):
    """Round a vector of float32 to the nearest bfloat16, ties to even."""
    bits = builder.bitcast(x, INTS)
    sixteen, one, half = (ir.Constant(INTS, [n] * LANES) for n in (16, 1, 0x7FFF))
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    rounded = builder.add(builder.add(bits, half), odd)
    return builder.trunc(builder.lshr(rounded, sixteen), SHORTS)
