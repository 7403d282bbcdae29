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

INT8, BF16, FLOAT32, INT8_PAIRS = range(4)
WORDS = ir.VectorType(INT16, LANES)


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

    INT8_PAIRS is INT8 with AVX2, where a vector has 4 outputs instead of 16. Its instruction
    multiplies 16 numbers in int16 and adds each product to its neighbour. An output therefore has
    two sums until the end.
    """
    numbers_of, num_rows, num_vectors, num_chains = (
        literal.literal_value for literal in (kind, rows, vectors, chains))
    is_float32, is_pairs = numbers_of == FLOAT32, numbers_of == INT8_PAIRS
    is_float = numbers_of in (BF16, FLOAT32)
    lanes = 4 if is_pairs else LANES
    numbers = ir.VectorType(FLOAT if is_float32 else INT32, lanes)
    result = FLOATS if is_float else numbers
    sums = ir.VectorType(INT32, 8) if is_pairs else result
    name = {INT8: "avx512.vpdpbusd.512", BF16: "avx512bf16.dpbf16ps.512"}.get(numbers_of)

    def emit(builder, _kind, _rows, _vectors, _chains, x, w, steps, out, ahead):
        x, x_row, x_step = cgutils.unpack_tuple(builder, x)
        w, w_step = cgutils.unpack_tuple(builder, w)
        out, out_row = cgutils.unpack_tuple(builder, out)
        ahead, ahead_step, lines = cgutils.unpack_tuple(builder, ahead)

        def row_of(address, row, step):
            return builder.add(address, builder.mul(INT(row), step))

        def load_weights(block, v):
            loaded = builder.load(element(builder, block, INT(v), 4 * lanes, numbers), align=4)
            if not is_pairs:
                return loaded
            return builder.zext(builder.bitcast(loaded, ir.VectorType(BYTE, LANES)), WORDS)

        def load_number(address):
            number = builder.load(pointer_to(builder, address, numbers.element), align=4)
            if not is_pairs:
                return copies(builder, number)
            four = builder.bitcast(number, ir.VectorType(BYTE, 4))
            number = builder.bitcast(builder.sext(four, ir.VectorType(INT16, 4)), INT)
            return builder.bitcast(copies(builder, number, 4), WORDS)

        def add(one, other):
            return builder.fadd(one, other, flags=FLAGS) if is_float else builder.add(one, other)

        def add_products(total, w, x):
            if is_float32:
                return add(total, builder.fmul(w, x, flags=FLAGS))
            if is_pairs:
                return add(total, call(builder, "x86.avx2.pmadd.wd", sums, w, x))
            return call(builder, f"x86.{name}", sums, total, w, x)

        results = {
            (row, v): element(builder, row_of(out, row, out_row), INT(v), 4 * lanes, result)
            for row in range(num_rows) for v in range(num_vectors)}
        # LLVM keeps them in registers. The first chain continues what `out` has.
        totals = {}
        for chain in range(num_chains):
            for (row, v), pointer in results.items():
                is_new = chain > 0 or is_pairs
                start = ir.Constant(sums, None) if is_new else builder.load(pointer, align=4)
                totals[chain, row, v] = cgutils.alloca_once_value(builder, start)
        with cgutils.for_range_slice(builder, INT(0), steps, INT(num_chains)) as (step, _):
            for chain in range(num_chains):
                this = builder.add(step, INT(chain))
                block = builder.add(w, builder.mul(this, w_step))
                line = builder.add(ahead, builder.mul(this, ahead_step))
                with cgutils.for_range(builder, lines) as later:
                    prefetch_line(builder, element(builder, line, later.index, 64, BYTE))
                weights = [load_weights(block, v) for v in range(num_vectors)]
                first = builder.add(x, builder.mul(this, x_step))
                for row in range(num_rows):
                    number = load_number(row_of(first, row, x_row))
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
                total = add(total, builder.load(totals[chain, row, v]))
            if is_pairs:
                even, odd = (ir.Constant(numbers, [h, 2 + h, 4 + h, 6 + h]) for h in range(2))
                both, total = total, builder.load(pointer, align=4)
                for half in even, odd:
                    total = add(total, builder.shuffle_vector(both, both, half))
            builder.store(total, pointer, align=4)

    return types.void(kind, rows, vectors, chains, x, w, steps, out, ahead), without_result(emit)
