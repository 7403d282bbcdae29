"""The inner loop of the CPU's products, with the dot products of AVX-512 for bfloat16 and int8.

LLVM compiles it only for a processor with the instruction: vdpbf16ps (AVX512-BF16) or vpdpbusd (VNNI).
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.backends.cpu.vectors import (
    BYTE,
    FLOATS,
    INT,
    INT32,
    LANES,
    at,
    call,
    copies,
    prefetch,
)

INT8, BF16 = 0, 1


@intrinsic(prefer_literal=True)
def dot_rows(typing, kind, rows, vectors, chains, x, w, steps, out, ahead):
    """out [rows, 16 * vectors] += x [rows, steps, N] w [steps, 16 * vectors, N].

    BF16: N = 2 numbers in bfloat16, and out is float32. INT8: N = 4, x is int8, w uint8, out int32.
    The first four arguments are literals, and `steps` is a multiple of `chains`. x is (address, row
    stride, step stride), w (address, step stride), and out (address, row stride), with all strides
    in bytes. `ahead` is (address, lines): step s prefetches `lines` cache lines, beginning with line
    s * lines from that address.

    The instruction multiplies N numbers of one row of x with those of 16 outputs and adds the
    products to 16 sums, which stay in registers. It waits for the one before it that adds to the
    same sums. Therefore few rows have several `chains` of sums, which take turns and are added at
    the end.
    """
    is_bf16, num_rows, num_vectors, num_chains = (
        literal.literal_value for literal in (kind, rows, vectors, chains))

    def generate(context, builder, signature, args):
        x, x_row, x_step, w, w_step, out, out_row, ahead, lines = (
            number for i in (4, 5, 7, 8) for number in cgutils.unpack_tuple(builder, args[i]))
        steps = args[6]
        numbers = ir.VectorType(INT32, LANES)
        sums = FLOATS if is_bf16 else numbers
        name = f"x86.{'avx512bf16.dpbf16ps.512' if is_bf16 else 'avx512.vpdpbusd.512'}"

        def row_of(address, row, step):
            return builder.add(address, builder.mul(INT(row), step))

        results = {
            (row, v): at(builder, row_of(out, row, out_row), INT(v), 64, sums)
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
                block = builder.add(w, builder.mul(this, w_step))
                line = builder.mul(this, lines)
                with cgutils.for_range(builder, lines) as later:
                    prefetch(builder, at(builder, ahead, builder.add(line, later.index), 64, BYTE))
                weights = [
                    builder.load(at(builder, block, INT(v), 64, numbers), align=4)
                    for v in range(num_vectors)]
                first = builder.add(x, builder.mul(this, x_step))
                for row in range(num_rows):
                    pointer = builder.inttoptr(row_of(first, row, x_row), INT32.as_pointer())
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

    return types.void(kind, rows, vectors, chains, x, w, steps, out, ahead), generate
