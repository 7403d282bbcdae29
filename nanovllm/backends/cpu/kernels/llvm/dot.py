"""The inner loop of products in float32, bfloat16 and int8, with dot products of the processor.

LLVM compiles them only for a processor with the instruction: vdpbf16ps (AVX512-BF16), vpdpbusd
(VNNI), vpmaddwd and vpmaddubsw (AVX2), or sdot (Arm). Without vdpbf16ps, a pair of bfloat16 is two
float32.

Each sum is formed in one order, from the first word to the last, however many rows there are.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.backends.cpu.jit import has_feature, has_sdot
from nanovllm.backends.cpu.kernels.llvm.emit import (
    BYTE,
    FLOAT,
    INT,
    INT16,
    INT32,
    call,
    element,
    pointer_to,
    prefetch_line,
    stored_to_float32,
    without_result,
)
from nanovllm.backends.cpu.kernels.llvm.vectors import FLOATS, FUSED, LANES, copies

HAS_AVX2, HAS_VNNI = has_feature("avx2"), has_feature("avx512vnni")
HAS_AVX512, HAS_BF16 = has_feature("avx512f"), has_feature("avx512bf16")
HAS_SDOT = has_sdot()
WORDS = ir.VectorType(INT16, LANES)
HEIGHTS = 6, 4, 2, 1  # rows that dot_rows computes at a time; for 16 columns at most 4


def add_neighbors(builder, a, b, name):
    """Return the sums of two neighbors each of a * b, in integers of twice the width.

    `name` is of AVX2's instruction. For "ub.sw", a is unsigned and a sum must fit in 16 bits.
    """
    number, count = a.type.element.width, a.type.count
    wide, result = (ir.VectorType(ir.IntType(2 * number), n) for n in (count, count // 2))
    if HAS_AVX2:
        return call(builder, f"x86.avx2.pmadd.{name}", result, a, b)
    extend = builder.zext if name == "ub.sw" else builder.sext
    products = builder.mul(extend(a, wide), builder.sext(b, wide))
    orders = (ir.Constant(ir.VectorType(INT32, count // 2), [*range(h, count, 2)]) for h in (0, 1))
    even, odd = (builder.shuffle_vector(products, products, order) for order in orders)
    return builder.add(even, odd)


def add_dot(builder, total, w, x):
    """Return sums in int32, to each of which the products of 4 numbers of w and x were added.

    The numbers of w are unsigned with VNNI, and signed with SDOT.
    """
    if not HAS_SDOT:
        return call(builder, "x86.avx512.vpdpbusd.512", total.type, total, w, x)
    w, x = (builder.bitcast(vector, ir.VectorType(BYTE, 16)) for vector in (w, x))
    return call(builder, "aarch64.neon.sdot.v4i32.v16i8", total.type, total, w, x)


def for_rows(builder, rows, heights, emit):
    """Emit a loop over rows, as many at a time as possible: emit(first row, one of `heights`).

    The heights are descending, and the last one is 1. With a loop for each height, LLVM would keep
    fewer addresses in registers.
    """
    first = cgutils.alloca_once_value(builder, INT(0))
    check, body, end = (builder.append_basic_block(name) for name in ("check", "body", "end"))
    builder.branch(check)
    builder.position_at_end(check)
    row = builder.load(first)
    left = builder.sub(rows, row)
    builder.cbranch(builder.icmp_signed(">", left, INT(0)), body, end)

    def emit_most(height, *smaller):
        if smaller:
            fits = builder.icmp_signed(">=", left, INT(height))
            with builder.if_else(fits) as (many, fewer):
                with many:
                    emit_most(height)
                with fewer:
                    emit_most(*smaller)
        else:
            emit(row, height)
            builder.store(builder.add(row, INT(height)), first)

    builder.position_at_end(body)
    emit_most(*heights)
    builder.branch(check)
    builder.position_at_end(end)


@intrinsic(prefer_literal=True)
def dot_rows(typing, word, columns, x, w, steps, out, rows, ahead):
    """Compute out [rows, columns] += x [rows, steps] w [steps, columns], in words of 4 bytes.

    The type of `word` tells what the words are: float32 a number, uint16 and uint32 two numbers in
    bfloat16, int32 four numbers, in int8 in x and in uint8 in w. uint8 is float32 in x and fp8, a
    byte, in w. out is float32, or int32 for int8. The product of two words is the sum of the
    products of their numbers.

    columns (16, 32 or 64) is a literal. x is (address, row stride, step stride), w (address, step
    stride), and out (address, row stride), with all strides in bytes. Up to 6 rows are
    computed at a time, with as many sums as possible in registers during all steps. `ahead` is
    (address, stride, lines, rows): in step s, rows that are computed together prefetch `lines`
    cache lines from address + stride * s, and the next ones go on there, up to so many rows.

    With SDOT and with AVX2 a vector of int8 has 4 outputs instead of 16. AVX2's instruction
    multiplies 16 numbers in int16 and adds each product to its neighbor. An output therefore has
    two sums until the end.
    """
    width = columns.literal_value
    is_int8 = word == types.int32
    is_fp8 = word == types.uint8
    is_float32 = word == types.float32 or is_fp8
    is_halves = not (is_float32 or is_int8 or HAS_BF16)
    is_sdot = is_int8 and HAS_SDOT
    is_pairs = is_int8 and not (HAS_VNNI or HAS_SDOT)
    lanes = 4 if is_pairs or is_sdot else LANES
    numbers = ir.VectorType(FLOAT if is_float32 else INT32, lanes)
    result = numbers if is_int8 else FLOATS
    sums = ir.VectorType(INT32, 8) if is_pairs else result
    # Sums may take three quarters of the registers. `unit`: how many 16 outputs of a row take.
    registers, unit = (24, 1) if HAS_AVX512 and not is_pairs else (12, 4 if is_pairs else 2)
    word_bytes = 1 if is_fp8 else 4  # of w

    def emit(builder, _word, _width, x, w, steps, out, rows, ahead):
        ahead, ahead_step, lines, last = cgutils.unpack_tuple(builder, ahead)
        place = cgutils.alloca_once_value(builder, ahead)

        def add_rows(row, count):
            ahead = builder.load(place)
            number = builder.select(builder.icmp_signed("<", row, last), lines, INT(0))
            if word == types.float32 and count == 1:  # the processor's own prefetching is faster
                number = INT(0)
            emit_rows(builder, row, count, x, w, steps, out, (ahead, ahead_step, number))
            builder.store(builder.add(ahead, builder.mul(ahead_step, steps)), place)

        for_rows(builder, rows, HEIGHTS if width == 64 else HEIGHTS[1:], add_rows)

    def emit_rows(builder, first_row, num_rows, x, w, steps, out, ahead):
        height = num_rows if num_rows * unit <= registers else min(num_rows, 2)
        outputs = max(
            n for n in (16, 32, 64) if height * n // 16 * unit <= registers and n <= width)
        num_vectors = outputs // lanes
        passes = [(r, c) for r in range(0, num_rows, height) for c in range(0, width, outputs)]
        x, x_row, x_step = cgutils.unpack_tuple(builder, x)
        w, w_step = cgutils.unpack_tuple(builder, w)
        out, out_row = cgutils.unpack_tuple(builder, out)
        x = builder.add(x, builder.mul(first_row, x_row))
        out = builder.add(out, builder.mul(first_row, out_row))
        ahead, ahead_step, lines = ahead
        # Each pass prefetches a part of the lines.
        count = INT(len(passes))
        ahead_step = builder.udiv(ahead_step, count)
        lines = builder.udiv(builder.add(lines, builder.sub(count, INT(1))), count)

        def row_of(address, row, step):
            return builder.add(address, builder.mul(INT(row), step))

        def load_weights(block, v):
            if is_fp8:
                kind = ir.VectorType(BYTE, LANES)
                loaded = builder.load(element(builder, block, INT(v), LANES, kind), align=1)
                return stored_to_float32(builder, loaded)
            loaded = builder.load(element(builder, block, INT(v), 4 * lanes, numbers), align=4)
            if is_sdot:  # the numbers that are stored larger by 128, as signed ones
                flip = ir.Constant(numbers, [0x80808080] * lanes)
                return builder.xor(loaded, flip)
            if not is_pairs:
                return loaded
            return builder.zext(builder.bitcast(loaded, ir.VectorType(BYTE, LANES)), WORDS)

        def load_word(address):
            loaded = builder.load(pointer_to(builder, address, numbers.element), align=4)
            if not is_pairs:
                return copies(builder, loaded, lanes)
            four = builder.bitcast(loaded, ir.VectorType(BYTE, 4))
            loaded = builder.bitcast(builder.sext(four, ir.VectorType(INT16, 4)), INT)
            return builder.bitcast(copies(builder, loaded, 4), WORDS)

        def add(one, other):
            return builder.add(one, other) if is_int8 else builder.fadd(one, other, flags=FUSED)

        def halves(words):
            """Return the first and the second numbers of pairs in bfloat16 as float32."""
            shift, mask = (ir.Constant(numbers, [n] * lanes) for n in (16, 0xFFFF0000))
            both = builder.shl(words, shift), builder.and_(words, mask)
            return [builder.bitcast(half, FLOATS) for half in both]

        def add_products(total, w, x):
            if is_float32:
                return add(total, builder.fmul(w, x, flags=FUSED))
            if is_halves:
                for a, b in zip(halves(w), halves(x), strict=True):
                    total = add(total, builder.fmul(a, b, flags=FUSED))
                return total
            if is_pairs:
                return add(total, add_neighbors(builder, w, x, "wd"))
            if is_int8:
                return add_dot(builder, total, w, x)
            return call(builder, "x86.avx512bf16.dpbf16ps.512", sums, total, w, x)

        def add_pass(x, w, out, ahead):
            results = {
                (row, v): element(builder, row_of(out, row, out_row), INT(v), 4 * lanes, result)
                for row in range(height) for v in range(num_vectors)}
            # LLVM keeps them in registers.
            totals = {}
            for place, pointer in results.items():
                start = ir.Constant(sums, None) if is_pairs else builder.load(pointer, align=4)
                totals[place] = cgutils.alloca_once_value(builder, start)
            with cgutils.for_range(builder, steps) as step:
                block = builder.add(w, builder.mul(step.index, w_step))
                line = builder.add(ahead, builder.mul(step.index, ahead_step))
                with cgutils.for_range(builder, lines) as later:
                    prefetch_line(builder, element(builder, line, later.index, 64, BYTE))
                weights = [load_weights(block, v) for v in range(num_vectors)]
                first = builder.add(x, builder.mul(step.index, x_step))
                for row in range(height):
                    number = load_word(row_of(first, row, x_row))
                    for v in range(num_vectors):
                        total = totals[row, v]
                        builder.store(add_products(builder.load(total), weights[v], number), total)
            for place, pointer in results.items():
                total = builder.load(totals[place])
                if is_pairs:
                    even, odd = (ir.Constant(numbers, [h, 2 + h, 4 + h, 6 + h]) for h in range(2))
                    both, total = total, builder.load(pointer, align=4)
                    for half in even, odd:
                        total = add(total, builder.shuffle_vector(both, both, half))
                builder.store(total, pointer, align=4)

        for i, (row, column) in enumerate(passes):
            place = builder.add(row_of(out, row, out_row), INT(4 * column))
            later = builder.add(ahead, builder.mul(builder.mul(INT(i), ahead_step), steps))
            first_word = builder.add(w, INT(word_bytes * column))
            add_pass(row_of(x, row, x_row), first_word, place, later)

    return types.void(word, columns, x, w, steps, out, rows, ahead), without_result(emit)
