"""The inner loop of the CPU's products, with the dot products of AVX-512 for bfloat16 and int8.

LLVM compiles it only for a processor with the instruction: vdpbf16ps (AVX512-BF16) or vpdpbusd (VNNI).
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

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
        byte, int32, int64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
        numbers = ir.VectorType(int32, 16)
        sums = ir.VectorType(ir.FloatType(), 16) if is_bf16 else numbers
        undefined = ir.Constant(numbers, ir.Undefined)

        def function(name, result, *arguments):
            kind = ir.FunctionType(result, arguments)
            return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)

        def at(address, offset, kind):
            moved = builder.add(address, int64(offset))
            return builder.inttoptr(moved, kind.as_pointer())

        def row_of(address, row, step):
            return builder.add(address, builder.mul(int64(row), step))

        name = "avx512bf16.dpbf16ps.512" if is_bf16 else "avx512.vpdpbusd.512"
        dot = function(f"llvm.x86.{name}", sums, sums, numbers, numbers)
        prefetch = function(
            "llvm.prefetch.p0", ir.VoidType(), byte.as_pointer(), int32, int32, int32)
        results = {
            (row, v): at(row_of(out, row, out_step), 64 * v, sums)
            for row in range(num_rows) for v in range(num_vectors)}
        # The first chain continues what `out` has.
        initial = {
            (chain, row, v): ir.Constant(sums, None) if chain else builder.load(pointer, align=4)
            for chain in range(num_chains) for (row, v), pointer in results.items()}
        before = builder.block
        loop, end = builder.append_basic_block("loop"), builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(int64)
        old, new = {key: builder.phi(sums) for key in initial}, {}
        for chain in range(num_chains):
            this = builder.add(step, int64(chain))
            block = builder.add(w, builder.mul(this, int64(64 * num_vectors)))
            if distance:
                for v in range(num_vectors):
                    line = at(block, distance + 64 * v, byte)
                    builder.call(prefetch, (line, int32(0), int32(3), int32(1)))
            weights = [
                builder.load(at(block, 64 * v, numbers), align=4) for v in range(num_vectors)]
            for row in range(num_rows):
                offset = builder.add(row_of(x, row, x_step), builder.mul(this, int64(4)))
                number = builder.load(at(offset, 0, int32), align=4)
                first = builder.insert_element(undefined, number, int32(0))
                copies = builder.shuffle_vector(first, undefined, ir.Constant(numbers, None))
                for v in range(num_vectors):
                    key = chain, row, v
                    new[key] = builder.call(dot, (old[key], weights[v], copies))
        following = builder.add(step, int64(num_chains))
        step.add_incoming(int64(0), before)
        step.add_incoming(following, loop)
        for key, value in old.items():
            value.add_incoming(initial[key], before)
            value.add_incoming(new[key], loop)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, end)
        builder.position_at_end(end)
        for (row, v), pointer in results.items():
            total = new[0, row, v]
            for chain in range(1, num_chains):
                total = (builder.fadd if is_bf16 else builder.add)(total, new[chain, row, v])
            builder.store(total, pointer, align=4)
        return context.get_dummy_value()

    arguments = kind, rows, vectors, chains, ahead, x, x_stride, w, steps, out, out_stride
    return types.void(*arguments), generate
