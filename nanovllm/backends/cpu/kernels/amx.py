"""Products of few rows in bfloat16 with AMX, the matrix instructions of Intel's processors.

The arguments and shapes are in kernels/product.py. LLVM compiles this kernel only for a processor
with AMX.

There are eight tiles of up to 16 rows of up to 64 bytes. tile_dot multiplies bfloat16 numbers in
pairs, which are neighbours in a row of A and in a row of B, and sums in float32 over all k:

    C[m, n] += A[m, 2k] B[k, 2n] + A[m, 2k + 1] B[k, 2n + 1]
"""

import numpy as np
from numba.extending import intrinsic

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.llvm.emit import instruction
from nanovllm.backends.cpu.kernels.primitives import BFLOAT16, f32, prefetch_range
from nanovllm.backends.cpu.kernels.product import finish, padded_bytes

TILE_ROWS = 16
WIDTH = 32  # outputs of a block of the packed weight
CACHED_ROWS = 256  # that are multiplied with all blocks of a thread
# Prefetch distance of weights, in each block that is read.
PREFETCH_BYTES = 2048

# tile_config sets all shapes from uint8 [64]: [0] is 1, [16 + 2t] the bytes per row of tile t, and
# [48 + t] its rows. tile_load and tile_store access rows that begin `stride` bytes apart.
_literal = intrinsic(prefer_literal=True)
tile_config = intrinsic(lambda typing, config: instruction("x86.ldtilecfg", "array", config))
tile_release = intrinsic(lambda typing: instruction("x86.tilerelease", ""))
tile_zero = _literal(lambda typing, tile: instruction("x86.tilezero", "tile", tile))
tile_load = _literal(lambda typing, tile, address, stride: instruction(
    "x86.tileloadd64", "tile address number", tile, address, stride))
tile_store = _literal(lambda typing, tile, address, stride: instruction(
    "x86.tilestored64", "tile address number", tile, address, stride))
tile_dot = _literal(lambda typing, c, a, b: instruction("x86.tdpbf16ps", "tile tile tile", c, a, b))
# This multiplies four int8 numbers of A and four uint8 numbers of B at a time. C is int32.
tile_dot_int8 = _literal(
    lambda typing, c, a, b: instruction("x86.tdpbsud", "tile tile tile", c, a, b))


@compiled()
def multiply_rows(x_ptr, weight_ptr, bias_ptr, out_ptr, rows, x_stride, outputs, start, stop):
    """Compute blocks of 32 outputs for all rows, which are `x_stride` bytes apart.

    W is stored as [outputs / 32, inputs / 2, 32, 2], which puts two tiles B side by side:

        output          0      1    ..    15     16     17   ..    31
        inputs 0, 1 [ w  w | w  w | .. | w  w | w  w | w  w | .. | w  w ]
               2, 3 [ w  w | w  w | .. | w  w | w  w | w  w | .. | w  w ]
                 .. [         tile 6          |         tile 7          ]

    Tiles 4 and 5 are 32 inputs of two sets of rows of x. All sets have the same height, so the last
    one may start early and compute some rows again. Up to 16 rows are one set, and two blocks are
    computed at a time: each tile of x serves both, and memory is read at two places, which is
    faster than at one. Tiles 0 to 3 accumulate.
    """
    panels = (rows + 2 * TILE_ROWS - 1) // (2 * TILE_ROWS)
    two_sets = rows > TILE_ROWS
    height = (rows + 2 * panels - 1) // (2 * panels) if two_sets else rows
    config = np.zeros(64, np.uint8)
    config[0], config[16:32:2], config[48:54], config[54:56] = 1, 64, height, TILE_ROWS
    tile_config(config)
    acc = np.empty((2, height, 32), f32)
    half_bytes = 128 * height
    for block in range(start, stop, 1 if two_sets else 2):
        acc_ptr = np.int64(acc.ctypes.data)
        other_block = block if two_sets else min(block + 1, stop - 1)
        for panel in range(panels):
            first = min(2 * panel * height, rows - height)
            second = min(first + height, rows - height)
            x0, x1 = x_ptr + first * x_stride, x_ptr + second * x_stride
            w = weight_ptr + block * 32 * x_stride
            other = (other_block - block) * 32 * x_stride
            tile_zero(0)
            tile_zero(1)
            tile_zero(2)
            tile_zero(3)
            for _ in range(x_stride // 64):
                if panel == 0:
                    prefetch_range(w + PREFETCH_BYTES, 2048)
                tile_load(6, w, 128)
                tile_load(7, w + 64, 128)
                tile_load(4, x0, x_stride)
                tile_dot(0, 4, 6)
                tile_dot(1, 4, 7)
                if two_sets:
                    tile_load(5, x1, x_stride)
                    tile_dot(2, 5, 6)
                    tile_dot(3, 5, 7)
                else:
                    prefetch_range(w + other + PREFETCH_BYTES, 2048)
                    tile_load(6, w + other, 128)
                    tile_load(7, w + other + 64, 128)
                    tile_dot(2, 4, 6)
                    tile_dot(3, 4, 7)
                x0, x1, w = x0 + 64, x1 + 64, w + 2048
            tile_store(0, acc_ptr, 128)
            tile_store(1, acc_ptr + 64, 128)
            tile_store(2, acc_ptr + half_bytes, 128)
            tile_store(3, acc_ptr + half_bytes + 64, 128)
            for half in range(2):
                begin, column = (second, other_block) if half else (first, block)
                finish(acc_ptr + half * half_bytes, 0, 0, 0, bias_ptr,
                       out_ptr + 2 * begin * outputs, height, outputs, WIDTH * column, WIDTH,
                       f32(0), BFLOAT16)
    tile_release()


@compiled()
def linear_blocks(x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example,
                  start, stop):
    """Compute blocks of 32 outputs by AMX, as kernels/product.py describes.

    Rows that stay in the cache are multiplied with all blocks before the next ones.
    """
    stride = padded_bytes(inputs, 2)
    for first in range(0, rows, CACHED_ROWS):
        multiply_rows(x_ptr + first * stride, weight_ptr, bias_ptr, out_ptr + 2 * first * outputs,
                      min(CACHED_ROWS, rows - first), stride, outputs, start, stop)
