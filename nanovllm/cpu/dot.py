"""The inner loop of the CPU's products, with the dot products of AVX-512 for bfloat16 and int8.

LLVM compiles it only for a processor with the instruction: vdpbf16ps (AVX512-BF16) or vpdpbusd (VNNI).
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.cpu.vectors import BYTE, FLOATS, INT, INT32, LANES, at, call, copies, prefetch

INT8, BF16 = 0, 1


@intrinsic(prefer_literal=True)
def dot_rows(typing, kind, rows, vectors, chains, ahead, x, x_stride, w, steps, out, out_stride):
    """out [rows, 16 * vectors] += x [rows, steps, N] w [steps, 16 * vectors, N].

    BF16: N = 2 numbers in bfloat16, and out is float32. INT8: N = 4, x is int8, w uint8, out int32.
    x, w and out are addresses; the rows of x and out begin x_stride and out_stride bytes apart.
    The instruction multiplies N numbers of one row of x with those of 16 outputs and adds the
    products to 16 sums, which stay in registers. It waits for the one before it that adds to the
    same sums. Therefore few rows have several `chains` of sums, which take turns and are added at
    the end. w is prefetched `ahead` bytes ahead, if that is not 0. The first five arguments are
    literals, and `steps` is a multiple of `chains`.
    """
    is_bf16, num_rows, num_vectors, num_chains, distance = (
        literal.literal_value for literal in (kind, rows, vectors, chains, ahead))

    def generate(context, builder, signature, args):
        x, x_step, w, steps, out, out_step = args[5:]
        numbers = ir.VectorType(INT32, LANES)
        sums = FLOATS if is_bf16 else numbers
        name = f"x86.{'avx512bf16.dpbf16ps.512' if is_bf16 else 'avx512.vpdpbusd.512'}"

        def row_of(address, row, step):
            return builder.add(address, builder.mul(INT(row), step))

        results = {
            (row, v): at(builder, row_of(out, row, out_step), INT(v), 64, sums)
            for row in range(num_rows) for v in range(num_vectors)}
        # LLVM keeps them in registers. The first chain continues what `out` has.
        totals = {}
        for chain in range(num_chains):
            for (row, v), pointer in results.items():
                start = ir.Constant(sums, None) if chain else builder.load(pointer, align=4)
                totals[chain, row, v] = cgutils.alloca_once_value(builder, start)
        with cgutils.for_range_slice(builder, INT(0), steps, INT(num_chains)) as (step, _):
            for chain in range(num_chains):
                this = builder.add(step, INT(chain))
                block = builder.add(w, builder.mul(this, INT(64 * num_vectors)))
                if distance:
                    for v in range(num_vectors):
                        prefetch(builder, at(builder, block, INT(distance + 64 * v), 1, BYTE))
                weights = [
                    builder.load(at(builder, block, INT(v), 64, numbers), align=4)
                    for v in range(num_vectors)]
                for row in range(num_rows):
                    pointer = at(builder, row_of(x, row, x_step), this, 4, INT32)
                    number = copies(builder, builder.load(pointer, align=4))
                    for v in range(num_vectors):
                        total = totals[chain, row, v]
                        added = call(builder, name, sums, builder.load(total), weights[v], number)
                        builder.store(added, total)
        for (row, v), pointer in results.items():
            total = builder.load(totals[0, row, v])
            for chain in range(1, num_chains):
                other = builder.load(totals[chain, row, v])
                total = (builder.fadd if is_bf16 else builder.add)(total, other)
            builder.store(total, pointer, align=4)
        return context.get_dummy_value()

    arguments = kind, rows, vectors, chains, ahead, x, x_stride, w, steps, out, out_stride
    return types.void(*arguments), generate
