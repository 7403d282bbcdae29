"""The inner loop of products with weights in int4, with VNNI (AVX-512) or AVX2."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.backends.cpu.kernels.llvm.calls import (
    BYTE,
    FLOAT,
    HALF,
    INT,
    INT16,
    INT32,
    call,
    element,
    prefetch_line,
    without_result,
)

OUTPUTS, GROUP = 16, 32
AHEAD = 8192  # bytes between the weights that are used and those that are prefetched


@intrinsic(prefer_literal=True)
def int4_rows(typing, lanes, rows, x, stride, weight, scale, groups, out):
    """out [rows, 16] float32 = sum over groups of scale * (start + x values).

    lanes and rows are literals, all others addresses or sizes: x has the rows of `quantize_rows`,
    `stride` bytes apart, weight [groups, 4, 16] int32, scale [groups, 16] float16. With 16 lanes
    the instruction is vpdpbusd (VNNI). With 8 lanes it is vpmaddubsw (AVX2), whose sums of 16 bits
    hold the 16 products of a group that belong to them: 16 * 15 * 127 < 2^15.
    """
    num_lanes, num_rows = lanes.literal_value, rows.literal_value
    has_vnni = num_lanes == OUTPUTS
    numbers, floats = ir.VectorType(INT32, num_lanes), ir.VectorType(FLOAT, num_lanes)
    halves = ir.VectorType(HALF, num_lanes)
    bytes_kind, words = ir.VectorType(BYTE, 4 * num_lanes), ir.VectorType(INT16, 2 * num_lanes)

    def splat(builder, number):
        undefined = ir.Constant(ir.VectorType(number.type, num_lanes), ir.Undefined)
        first = builder.insert_element(undefined, number, INT32(0))
        order = ir.Constant(ir.VectorType(INT32, num_lanes), None)
        return builder.shuffle_vector(first, first, order)

    def integer_sum(builder, start, pairs):
        """Return start plus the products of all (weights, numbers of x)."""
        if has_vnni:
            for w, number in pairs:
                start = call(builder, "x86.avx512.vpdpbusd.512", numbers, start, w, number)
            return start
        total = ir.Constant(words, None)
        for pair in pairs:
            w, number = (builder.bitcast(vector, bytes_kind) for vector in pair)
            total = builder.add(total, call(builder, "x86.avx2.pmadd.ub.sw", words, w, number))
        ones = ir.Constant(words, [1] * 2 * num_lanes)
        return builder.add(start, call(builder, "x86.avx2.pmadd.wd", numbers, total, ones))

    def emit(builder, _lanes, _rows, x, stride, weight, scale, groups, out):
        mask = ir.Constant(numbers, [0x0F0F0F0F] * num_lanes)
        four = ir.Constant(numbers, [4] * num_lanes)
        for part in range(OUTPUTS // num_lanes):
            offset = part * num_lanes
            zeros = ir.Constant(floats, None)
            totals = [cgutils.alloca_once_value(builder, zeros) for _ in range(num_rows)]
            for total in totals:
                builder.store(zeros, total)
            with cgutils.for_range(builder, groups) as loop:
                first = builder.add(builder.mul(loop.index, INT(4 * OUTPUTS)), INT(offset))
                lines = builder.mul(loop.index, INT(4))
                for line in range(AHEAD // 64, AHEAD // 64 + 4):
                    number = builder.add(lines, INT(line))
                    prefetch_line(builder, element(builder, weight, number, 64, BYTE))
                low, high = [], []
                for p in range(4):
                    number = builder.add(first, INT(p * OUTPUTS))
                    both = builder.load(element(builder, weight, number, 4, numbers), align=4)
                    low.append(builder.and_(both, mask))
                    high.append(builder.and_(builder.lshr(both, four), mask))
                number = builder.add(builder.mul(loop.index, INT(OUTPUTS)), INT(offset))
                stored = builder.load(element(builder, scale, number, 2, halves), align=2)
                group_scale = builder.fpext(stored, floats)
                for row, total in enumerate(totals):
                    values = builder.add(x, builder.mul(INT(row), stride))
                    starts = builder.add(builder.mul(groups, INT(GROUP)), INT(4))
                    starts = builder.add(values, starts)  # after the values and their scale
                    number = builder.load(element(builder, starts, loop.index, 4, INT32), align=4)
                    start = splat(builder, number)
                    pairs = []
                    for p, w in enumerate(low + high):
                        at = builder.add(builder.mul(loop.index, INT(GROUP // 4)), INT(p))
                        four_numbers = builder.load(element(builder, values, at, 4, INT32), align=4)
                        pairs.append((w, splat(builder, four_numbers)))
                    exact = builder.sitofp(integer_sum(builder, start, pairs), floats)
                    suffix = f"fma.v{num_lanes}f32"
                    added = call(builder, suffix, floats, exact, group_scale, builder.load(total))
                    builder.store(added, total)
            for row, total in enumerate(totals):
                place = element(builder, out, INT(row * OUTPUTS + offset), 4, floats)
                builder.store(builder.load(total), place, align=4)

    signature = types.void(lanes, rows, x, stride, weight, scale, groups, out)
    return signature, without_result(emit)
