"""The inner loop of products in int4, for any processor; see backends/cpu/kernels/int4.py."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.backends.cpu.kernels.llvm import dot
from nanovllm.backends.cpu.kernels.llvm.emit import (
    BYTE,
    FLOAT,
    HALF,
    INT,
    INT16,
    INT32,
    element,
    prefetch_line,
    without_result,
)
from nanovllm.backends.cpu.kernels.llvm.vectors import FUSED, LANES, copies
from nanovllm.backends.int4 import GROUP_SIZE

AHEAD = 8192  # bytes between the weights that are used and those that are prefetched


@intrinsic
def int4_rows(typing, x, stride, weight, scale, groups, out, rows):
    """Compute out [rows, 16] float32 = sum over groups of scale * (start + x values).

    The arguments are addresses and sizes: x has the rows of `quantize_rows`, `stride` bytes apart,
    weight [groups, 4, 16] int32, scale [groups, 16] float16. The instruction is vpdpbusd (VNNI),
    sdot (Arm), or vpmaddubsw (AVX2), whose sums of 16 bits hold the 16 products of a group that
    belong to them: 16 * 15 * 127 < 2^15.
    """
    has_dot = dot.HAS_VNNI or dot.HAS_SDOT
    lanes = 4 if dot.HAS_SDOT else LANES if dot.HAS_VNNI else LANES // 2
    heights = (8, 4, 2, 1) if has_dot else (2, 1)
    numbers, floats, halves, bytes_kind = (
        ir.VectorType(kind, count)
        for kind, count in ((INT32, lanes), (FLOAT, lanes), (HALF, lanes), (BYTE, 4 * lanes)))

    def integer_sum(builder, start, pairs):
        """Return start plus the products of all (weights, numbers of x)."""
        if has_dot:
            for pair in pairs:
                start = dot.add_dot(builder, start, *pair)
            return start
        words = ir.VectorType(INT16, 2 * lanes)
        total = ir.Constant(words, None)
        for pair in pairs:
            w, number = (builder.bitcast(vector, bytes_kind) for vector in pair)
            total = builder.add(total, dot.add_neighbors(builder, w, number, "ub.sw"))
        ones = ir.Constant(words, [1] * 2 * lanes)
        return builder.add(start, dot.add_neighbors(builder, ones, total, "wd"))

    def emit(builder, x, stride, weight, scale, groups, out, rows):
        def add_rows(row, count):
            emit_rows(builder, row, count, x, stride, weight, scale, groups, out)

        dot.for_rows(builder, rows, heights, add_rows)

    def emit_rows(builder, first_row, height, x, stride, weight, scale, groups, out):
        x = builder.add(x, builder.mul(first_row, stride))
        out = builder.add(out, builder.mul(first_row, INT(4 * LANES)))
        mask, four = (ir.Constant(numbers, [n] * lanes) for n in (0x0F0F0F0F, 4))

        def load(address, number, size, kind):
            return builder.load(element(builder, address, number, size, kind), align=size)

        for offset in range(0, LANES, lanes):
            totals = [
                cgutils.alloca_once_value(builder, ir.Constant(floats, None))
                for _ in range(height)]
            with cgutils.for_range(builder, groups) as loop:
                group = loop.index
                first = builder.add(builder.mul(group, INT(4 * LANES)), INT(offset))
                lines = builder.mul(group, INT(4))
                for line in range(AHEAD // 64, AHEAD // 64 + 4):
                    number = builder.add(lines, INT(line))
                    prefetch_line(builder, element(builder, weight, number, 64, BYTE))
                both = [
                    load(weight, builder.add(first, INT(p * LANES)), 4, numbers) for p in range(4)]
                low = [builder.and_(vector, mask) for vector in both]
                high = [builder.and_(builder.lshr(vector, four), mask) for vector in both]
                number = builder.add(builder.mul(group, INT(LANES)), INT(offset))
                group_scale = builder.fpext(load(scale, number, 2, halves), floats)
                for row, total in enumerate(totals):
                    values = builder.add(x, builder.mul(INT(row), stride))
                    # They follow the values, their scale and the start of all groups.
                    starts = builder.add(builder.mul(groups, INT(GROUP_SIZE)), INT(8))
                    starts = builder.add(values, starts)
                    start = copies(builder, load(starts, group, 4, INT32), lanes)
                    pairs = []
                    for p, w in enumerate(low + high):
                        at = builder.add(builder.mul(group, INT(GROUP_SIZE // 4)), INT(p))
                        pairs.append((w, copies(builder, load(values, at, 4, INT32), lanes)))
                    exact = builder.sitofp(integer_sum(builder, start, pairs), floats)
                    scaled = builder.fmul(exact, group_scale, flags=FUSED)
                    added = builder.fadd(builder.load(total), scaled, flags=FUSED)
                    builder.store(added, total)
            for row, total in enumerate(totals):
                place = element(builder, out, INT(row * LANES + offset), 4, floats)
                builder.store(builder.load(total), place, align=4)

    return types.void(x, stride, weight, scale, groups, out, rows), without_result(emit)
