"""Products of rows with packed weights, for every processor: blocks of 64 outputs.

A product of few rows takes as long as reading its weights, which are read in the order of memory.
The sum of an output is formed from the first word to the last, however many rows there are: a row
has the same bits in any company. amx.py has the kernel of processors with AMX, Intel's matrix
instructions.

A weight [O, I] is stored in words of 4 bytes, which are one number in float32, two in bfloat16 and
four in int8, as [O / 64, words, 64].
"""

from functools import cache

import numpy as np
import torch

from nanovllm.backends.cpu.jit import Kernel, compiled, has_amx, has_feature, has_sdot
from nanovllm.backends.cpu.kernels import amx
from nanovllm.backends.cpu.kernels.llvm.dot import HEIGHTS, dot_rows
from nanovllm.backends.cpu.kernels.parallel import address_for
from nanovllm.backends.cpu.kernels.primitives import bytes_of
from nanovllm.backends.cpu.kernels.product import Product, finish, pad_rows, padded_bytes

WIDTH = 64  # outputs of a block
MIN_ROWS = 64
CACHED_BYTES = 1 << 19  # of rows that are multiplied with all blocks of a thread
AHEAD = 4096  # bytes between the weights that are used and those that are prefetched
HEIGHT = HEIGHTS[0]
# The most rows that read each weight once. With AVX2, even the sums of one row in int8 do not fit
# into the registers, and dot_rows reads weights several times.
READ_ONCE = HEIGHT if has_feature("avx512vnni") or has_sdot() else 0


@compiled()
def steps_of(rows):
    """Return the words of each output that all rows are multiplied with before the next ones.

    These are 16 kB of weights, which stay in the first cache, or twice as many for many rows, whose
    sums are then loaded and stored half as often.
    """
    return 64 if rows <= MIN_ROWS else 128


@compiled()
def add_product(word, sums_ptr, sums_stride, x_ptr, stride, weight_ptr, weight_stride, steps, rows,
                distance):
    """Compute sums [rows, 64] += x [rows, steps] times weights [steps, 64], in words.

    The type of `word` is as in dot_rows. The strides are the bytes between rows. Prefetch as many
    weights, `distance` bytes after them; 0 means none.

    If weights are read several times, only the first time is from memory. All of them together
    prefetch the next weights, to keep memory busy meanwhile.
    """
    parts = (rows + HEIGHT - 1) // HEIGHT
    span = max(steps, 1) if rows <= READ_ONCE else steps_of(rows)
    lines = (parts + 3) // parts  # of the four cache lines of a step, what each part prefetches
    for first in range(0, steps, span):
        w = weight_ptr + weight_stride * first
        # The rows that prefetch.
        last = (4 * HEIGHT + lines - 1) // lines if distance != 0 else 0
        dot_rows(word, WIDTH, (x_ptr + 4 * first, stride, 4), (w, weight_stride),
                 min(span, steps - first), (sums_ptr, sums_stride), rows,
                 (w + distance, weight_stride * lines // 4, lines, last))


@compiled()
def add_block(word, sums_ptr, x_ptr, stride, weight_ptr, steps, rows):
    """Compute the same for a block of a weight in memory and sums [rows, 64] side by side."""
    ahead = AHEAD if rows <= READ_ONCE else 4 * WIDTH * steps_of(rows)
    add_product(word, sums_ptr, 4 * WIDTH, x_ptr, stride, weight_ptr, 4 * WIDTH, steps, rows, ahead)


@compiled()
def add_narrow(word, sums_ptr, sums_stride, x_ptr, stride, weight_ptr, weight_stride, steps, rows,
               distance):
    """Compute the same for 16 columns: sums [rows, 16] and weights [steps, 16]."""
    ahead = weight_ptr + distance, weight_stride, 1, 1 if distance != 0 else 0
    dot_rows(word, 16, (x_ptr, stride, 4), (weight_ptr, weight_stride), steps,
             (sums_ptr, sums_stride), rows, ahead)


@compiled()
def linear_blocks(x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example,
                  start, stop):
    """Compute blocks of 64 outputs in float32 or bfloat16, as product.py describes.

    As many rows as stay in the cache are multiplied with all blocks before the next ones.
    """
    stride = padded_bytes(inputs, bytes_of(example))
    height = min(rows, max(MIN_ROWS, CACHED_BYTES // stride))
    sums = np.empty((height, WIDTH), np.float32)
    for first in range(0, rows, height):
        count = min(height, rows - first)
        x = x_ptr + first * stride
        for block in range(start, stop):
            o = WIDTH * block
            sums_ptr = np.int64(sums.ctypes.data)
            sums[:] = 0
            add_block(example, sums_ptr, x, stride, weight_ptr + o * stride, stride // 4, count)
            out = out_ptr + first * outputs * bytes_of(example)
            finish(sums_ptr, 0, 0, 0, bias_ptr, out, count, outputs, o, WIDTH, np.float32(0),
                   example)


def kernel_for(dtype: torch.dtype) -> tuple[Kernel, int]:
    """Return the kernel for weights in a dtype, and its outputs of a block."""
    if dtype is torch.bfloat16 and has_amx():
        return amx.linear_blocks, amx.WIDTH
    return linear_blocks, WIDTH


@cache
def float_product(dtype: torch.dtype, inputs: int) -> Product:
    """Return how weights in a dtype with so many inputs are multiplied."""
    kernel, width = kernel_for(dtype)
    is_whole = padded_bytes(inputs, dtype.itemsize) == inputs * dtype.itemsize
    prepare = 0 if is_whole else address_for(pad_rows, dtype, dtype)
    return Product(address_for(kernel, dtype, dtype), width, dtype.itemsize, prepare)
