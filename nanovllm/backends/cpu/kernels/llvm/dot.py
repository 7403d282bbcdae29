"""The inner loops of the CPU's products, with dot products of the processor for bfloat16 and int8.

LLVM compiles them only for a processor with the instruction: vdpbf16ps (AVX512-BF16), vpdpbusd
(VNNI) or vpmaddwd (AVX2).
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.backends.cpu.kernels.llvm.calls import (
    BYTE,
    FLOAT,
    INT,
    INT16,
    INT32,
    call,
    element,
    keep_rolled,
    pointer_to,
    prefetch_line,
    without_result,
)
from nanovllm.backends.cpu.kernels.llvm.vectors import FLAGS, FLOATS, LANES, copies

INT8, BF16, FLOAT32 = 0, 1, 2


@intrinsic(prefer_literal=True)
def dot_rows(typing, kind, rows, vectors, chains, x, w, steps, out, ahead):
    """out [rows, 16 * vectors] += x [rows, steps, N] w [steps, 16 * vectors, N].

    BF16: N = 2 numbers in bfloat16, and out is float32. INT8: N = 4, x is int8, w uint8, out int32.
    The first four arguments are literals, and `steps` is a multiple of `chains`. x is (address, row
    stride, step stride), w (address, step stride), and out (address, row stride), with all strides
    in bytes. `ahead` is (address, stride, lines): step s prefetches `lines` cache lines that begin
    at address + s * stride.

    The instruction multiplies N numbers of one row of x with the weights of 16 outputs and adds the
    products to 16 sums, which stay in registers. It waits for the instruction before it that adds
    to the same sums. Few rows therefore have several `chains` of sums, which take turns and are
    added at the end.
    """
    numbers_of, num_rows, num_vectors, num_chains = (
        literal.literal_value for literal in (kind, rows, vectors, chains))
    is_float32 = numbers_of == FLOAT32

    def emit(builder, _kind, _rows, _vectors, _chains, x, w, steps, out, ahead):
        x, x_row, x_step = cgutils.unpack_tuple(builder, x)
        w, w_step = cgutils.unpack_tuple(builder, w)
        out, out_row = cgutils.unpack_tuple(builder, out)
        ahead, ahead_step, lines = cgutils.unpack_tuple(builder, ahead)
        numbers = ir.VectorType(FLOAT if is_float32 else INT32, LANES)
        sums = numbers if numbers_of == INT8 else FLOATS
        name = f"x86.{'avx512bf16.dpbf16ps.512' if numbers_of == BF16 else 'avx512.vpdpbusd.512'}"

        def add_products(total, w, x):
            if not is_float32:
                return call(builder, name, sums, total, w, x)
            return builder.fadd(total, builder.fmul(w, x, flags=FLAGS), flags=FLAGS)

        def row_of(address, row, step):
            return builder.add(address, builder.mul(INT(row), step))

        results = {
            (row, v): element(builder, row_of(out, row, out_row), INT(v), 64, sums)
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
                line = builder.add(ahead, builder.mul(this, ahead_step))
                with cgutils.for_range(builder, lines) as later:
                    prefetch_line(builder, element(builder, line, later.index, 64, BYTE))
                weights = [
                    builder.load(element(builder, block, INT(v), 64, numbers), align=4)
                    for v in range(num_vectors)]
                first = builder.add(x, builder.mul(this, x_step))
                for row in range(num_rows):
                    pointer = pointer_to(builder, row_of(first, row, x_row), numbers.element)
                    number = copies(builder, builder.load(pointer, align=4))
                    for v in range(num_vectors):
                        total = totals[chain, row, v]
                        added = add_products(builder.load(total), weights[v], number)
                        builder.store(added, total)
            last = builder.basic_block
        if is_float32:  # unrolled, it takes 4 to 13 % longer for 2 to 4 rows
            keep_rolled(builder.module, last.terminator)
        for (row, v), pointer in results.items():
            total = builder.load(totals[0, row, v])
            for chain in range(1, num_chains):
                other = builder.load(totals[chain, row, v])
                total = (builder.add if numbers_of == INT8 else builder.fadd)(total, other)
            builder.store(total, pointer, align=4)

    return types.void(kind, rows, vectors, chains, x, w, steps, out, ahead), without_result(emit)


@intrinsic(prefer_literal=True)
def dot_pairs(typing, rows, vectors, x, w, steps, out, ahead):
    """Compute dot_rows for INT8 with AVX2, where a vector has 4 outputs instead of 16.

    The instruction, vpmaddwd, multiplies 16 numbers in int16 and adds each product to its
    neighbour. An output therefore has two sums until the end.
    """
    num_rows, num_vectors = rows.literal_value, vectors.literal_value
    stored, words = ir.VectorType(BYTE, LANES), ir.VectorType(INT16, LANES)
    pairs, sums = ir.VectorType(INT32, 8), ir.VectorType(INT32, 4)

    def emit(builder, _rows, _vectors, x, w, steps, out, ahead):
        x, x_row, x_step = cgutils.unpack_tuple(builder, x)
        w, w_step = cgutils.unpack_tuple(builder, w)
        out, out_row = cgutils.unpack_tuple(builder, out)
        ahead, ahead_step, lines = cgutils.unpack_tuple(builder, ahead)
        places = [(row, v) for row in range(num_rows) for v in range(num_vectors)]
        zeros = ir.Constant(pairs, None)
        totals = {place: cgutils.alloca_once_value(builder, zeros) for place in places}
        for total in totals.values():
            builder.store(zeros, total)
        with cgutils.for_range(builder, steps) as step:
            block = builder.add(w, builder.mul(step.index, w_step))
            line = builder.add(ahead, builder.mul(step.index, ahead_step))
            with cgutils.for_range(builder, lines) as later:
                prefetch_line(builder, element(builder, line, later.index, 64, BYTE))
            weights = []
            for v in range(num_vectors):
                loaded = builder.load(element(builder, block, INT(v), 16, stored), align=4)
                weights.append(builder.zext(loaded, words))
            first = builder.add(x, builder.mul(step.index, x_step))
            for row in range(num_rows):
                address = builder.add(first, builder.mul(INT(row), x_row))
                four = builder.load(pointer_to(builder, address, ir.VectorType(BYTE, 4)), align=4)
                number = builder.bitcast(builder.sext(four, ir.VectorType(INT16, 4)), INT)
                number = builder.bitcast(copies(builder, number, 4), words)
                for v in range(num_vectors):
                    total = totals[row, v]
                    added = call(builder, "x86.avx2.pmadd.wd", pairs, weights[v], number)
                    builder.store(builder.add(builder.load(total), added), total)
        for row, v in places:
            both = builder.load(totals[row, v])
            halves = [
                builder.shuffle_vector(both, both, ir.Constant(sums, [2 * i + h for i in range(4)]))
                for h in range(2)]
            address = builder.add(out, builder.mul(INT(row), out_row))
            pointer = element(builder, address, INT(v), 16, sums)
            total = builder.add(builder.load(pointer, align=4), builder.add(*halves))
            builder.store(total, pointer, align=4)

    return types.void(rows, vectors, x, w, steps, out, ahead), without_result(emit)
