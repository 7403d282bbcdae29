"""Products of few rows for processors with AVX512-BF16 and without AMX, in bfloat16.

Such a product takes as long as reading its weights. oneDNN reads 16 GB/s of them for one row and
14 for 16 rows on the 2 cores of an EPYC; this kernel reads 27 and 15. LLVM compiles it only for a
processor with these instructions.
"""

import sys

import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.extending import intrinsic

from nanovllm.cpu.jit import compiled
from nanovllm.cpu.kernels import BFLOAT16, array, f32, from_float32, to_float32

WIDTH = 64  # outputs of a block of the packed weight: four vectors of 16
# Prefetch distance of weights.
PREFETCH_BYTES = 4096


def has_avx512_bf16() -> bool:
    """Whether Numba compiles for this processor, and it has the instructions."""
    named = numba.config.CPU_NAME or numba.config.CPU_FEATURES
    return not named and sys.byteorder == "little" and get_host_cpu_features().get("avx512bf16")


@intrinsic(prefer_literal=True)
def dot_rows(typing, rows, chains, x, x_stride, w, pairs, out):
    """out [rows, 64] float32 = x [rows, pairs, 2] w [pairs, 64, 2], summed over pairs.

    x, w and out are addresses; the rows of x begin `x_stride` bytes apart. vdpbf16ps multiplies a
    pair of one row of x with the pairs of 16 outputs and adds both products to 16 sums, which stay
    in registers. An instruction waits for the one before it that adds to the same sums. Therefore
    few rows have several `chains` of sums, which take turns and are added at the end. `rows` and
    `chains` are literals, and `pairs` is a multiple of `chains`.
    """
    num_rows, num_chains, vectors = rows.literal_value, chains.literal_value, WIDTH // 16

    def generate(context, builder, signature, args):
        _, _, x, stride, w, pairs, out = args
        byte, int32, int64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
        sums, numbers = ir.VectorType(ir.FloatType(), 16), ir.VectorType(int32, 16)
        undefined = ir.Constant(numbers, ir.Undefined)

        def function(name, result, *arguments):
            kind = ir.FunctionType(result, arguments)
            return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)

        def at(address, offset, kind):
            moved = builder.add(address, int64(offset))
            return builder.inttoptr(moved, kind.as_pointer())

        dot = function("llvm.x86.avx512bf16.dpbf16ps.512", sums, sums, numbers, numbers)
        prefetch = function(
            "llvm.prefetch.p0", ir.VoidType(), byte.as_pointer(), int32, int32, int32
        )
        before = builder.block
        loop, end = builder.append_basic_block("loop"), builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        pair = builder.phi(int64)
        pair.add_incoming(int64(0), before)
        old = {
            (chain, row, v): builder.phi(sums)
            for chain in range(num_chains)
            for row in range(num_rows)
            for v in range(vectors)
        }
        new = {}
        for chain in range(num_chains):
            this = builder.add(pair, int64(chain))
            block = builder.add(w, builder.mul(this, int64(4 * WIDTH)))
            weights = []
            for v in range(vectors):
                ahead = at(block, PREFETCH_BYTES + 64 * v, byte)
                builder.call(prefetch, (ahead, int32(0), int32(3), int32(1)))
                weights.append(builder.load(at(block, 64 * v, numbers), align=64))
            for row in range(num_rows):
                line = builder.add(x, builder.mul(int64(row), stride))
                number = builder.load(
                    at(builder.add(line, builder.mul(this, int64(4))), 0, int32), align=4
                )
                first = builder.insert_element(undefined, number, int32(0))
                copies = builder.shuffle_vector(first, undefined, ir.Constant(numbers, None))
                for v in range(vectors):
                    key = chain, row, v
                    new[key] = builder.call(dot, (old[key], copies, weights[v]))
        following = builder.add(pair, int64(num_chains))
        pair.add_incoming(following, loop)
        for key, value in old.items():
            value.add_incoming(ir.Constant(sums, None), before)
            value.add_incoming(new[key], loop)
        builder.cbranch(builder.icmp_signed("<", following, pairs), loop, end)
        builder.position_at_end(end)
        for row in range(num_rows):
            for v in range(vectors):
                total = new[0, row, v]
                for chain in range(1, num_chains):
                    total = builder.fadd(total, new[chain, row, v])
                builder.store(total, at(out, 4 * WIDTH * row + 64 * v, sums), align=4)
        return context.get_dummy_value()

    return types.void(rows, chains, x, x_stride, w, pairs, out), generate


@compiled()
def linear_blocks(x_ptr, weight_ptr, bias_ptr, out_ptr, rows, inputs, outputs, start, stop):
    """out [rows, outputs] = x [rows, inputs] W^T + bias: blocks [start, stop) of 64 outputs.

    oneDNN packs W as [outputs / 64, inputs / 2, 64, 2]. All groups of rows have the same height,
    so the last one may start early and compute some rows again.
    """
    out = array(out_ptr, (rows, outputs // WIDTH, WIDTH), BFLOAT16)
    height = 1 if rows < 2 else 2 if rows < 4 else 4 if rows == 5 or rows % 4 == 0 else 6
    acc, bias, stride = np.empty((6, WIDTH), f32), np.zeros(WIDTH, f32), 2 * inputs
    for block in range(start, stop):
        if bias_ptr != 0:
            for c in range(WIDTH):
                bias[c] = to_float32(array(bias_ptr, (outputs,), BFLOAT16)[WIDTH * block + c])
        w = weight_ptr + block * WIDTH * stride
        for group in range((rows + height - 1) // height):
            first = min(group * height, rows - height)
            x, to = x_ptr + first * stride, np.int64(acc.ctypes.data)
            if height == 6:
                dot_rows(6, 1, x, stride, w, inputs // 2, to)
            elif height == 4:
                dot_rows(4, 1, x, stride, w, inputs // 2, to)
            elif height == 2:
                dot_rows(2, 2, x, stride, w, inputs // 2, to)
            else:
                dot_rows(1, 4, x, stride, w, inputs // 2, to)
            for i in range(height):
                row = out[first + i, block]
                for c in range(WIDTH):
                    row[c] = from_float32(acc[i, c] + bias[c], BFLOAT16)
