"""Products of few rows with packed weights, for every processor: blocks of 64 outputs.

A product of few rows takes as long as reading its weights. On the 2 cores of an EPYC, oneDNN reads
16 GB/s of weights in bfloat16 for one row and this kernel 27; docs/measurements.md has more rows.
amx.py has the kernel of processors with AMX, Intel's matrix instructions.

A weight [O, I] is stored in words of 4 bytes, which are one number in float32, two in bfloat16 and
four in int8, as [O / 64, words, 64]. oneDNN packs float32 like this, and bfloat16 for processors
without AMX.
"""

import numpy as np
import torch

from nanovllm.backends.cpu.jit import Kernel, compiled, has_feature
from nanovllm.backends.cpu.kernels import amx
from nanovllm.backends.cpu.kernels.llvm.dot import dot_rows
from nanovllm.backends.cpu.kernels.parallel import address_for
from nanovllm.backends.cpu.kernels.primitives import bytes_of
from nanovllm.backends.cpu.kernels.product import Product, finish

WIDTH = 64  # outputs of a block
STEPS = 64  # words of each output that all rows are multiplied with before the next ones: 16 kB
AHEAD = 4096  # bytes between the weights that are used and those that are prefetched
HEIGHT = 6  # the most rows of a call of dot_rows
# The most rows that read each weight once. With AVX2, even the sums of one row in int8 do not fit
# into the registers, and dot_rows reads weights several times.
READ_ONCE = HEIGHT if has_feature("avx512vnni") else 0


@compiled()
def add_product(word, sums_ptr, x_ptr, stride, weight_ptr, steps, rows):
    """Compute sums [rows, 64] += x [rows, steps] times a block of weights [steps, 64], in words.

    The type of `word` is as in dot_rows. The rows of x begin `stride` bytes apart.

    If weights are read several times, the first time is from memory, and the others are from the
    cache. All of them together prefetch the next `span` of weights, to keep memory busy meanwhile.
    """
    parts, once = (rows + HEIGHT - 1) // HEIGHT, rows <= READ_ONCE
    span = steps if once else STEPS
    lines = (parts + 3) // parts  # of the four cache lines of a step, what each part prefetches
    for first in range(0, steps, span):
        count, w = min(span, steps - first), weight_ptr + 4 * WIDTH * first
        ahead, row = w + (AHEAD if once else 4 * WIDTH * span), 0
        while row < rows:
            x, left = (x_ptr + row * stride + 4 * first, stride, 4), rows - row
            out = sums_ptr + 4 * WIDTH * row, 4 * WIDTH
            fetched = lines if row * lines < 4 * HEIGHT else 0
            if left >= 6:
                dot_rows(word, 6, WIDTH, x, (w, 4 * WIDTH), count, out, (ahead, fetched))
                row += 6
            elif left >= 4:
                dot_rows(word, 4, WIDTH, x, (w, 4 * WIDTH), count, out, (ahead, fetched))
                row += 4
            elif left >= 2:
                dot_rows(word, 2, WIDTH, x, (w, 4 * WIDTH), count, out, (ahead, fetched))
                row += 2
            else:
                dot_rows(word, 1, WIDTH, x, (w, 4 * WIDTH), count, out, (ahead, fetched))
                row += 1
            ahead += 64 * lines * count


@compiled()
def linear_blocks(x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example,
                  start, stop):
    """Compute blocks of 64 outputs in float32 or bfloat16, as product.py describes."""
    itemsize, sums = bytes_of(example), np.empty((rows, WIDTH), np.float32)
    steps, sums_ptr = inputs * itemsize // 4, np.int64(sums.ctypes.data)
    for block in range(start, stop):
        o = WIDTH * block
        sums[:] = 0
        weight = weight_ptr + o * inputs * itemsize
        add_product(example, sums_ptr, x_ptr, 4 * steps, weight, steps, rows)
        bias = bias_ptr + o * itemsize if bias_ptr != 0 else np.int64(0)
        for row in range(rows):
            out = out_ptr + (row * outputs + o) * itemsize
            finish(sums_ptr + 4 * WIDTH * row, np.float32(1), np.int64(0), bias, out,
                   min(WIDTH, outputs - o), np.float32(0), example)


def kernel_for(dtype: torch.dtype) -> tuple[Kernel, int] | None:
    """Return the kernel for weights in this dtype that oneDNN packed, and its outputs of a block.

    None: there is none for this processor, and oneDNN computes all products.
    """
    if dtype is torch.bfloat16 and amx.is_available():
        return amx.linear_blocks, amx.WIDTH
    if dtype is torch.float32 or has_feature("avx512bf16"):
        return linear_blocks, WIDTH
    return None


def blocks_product(dtype: torch.dtype) -> Product | None:
    """Return how this kernel multiplies, or None if there is none."""
    found = kernel_for(dtype)
    return found and Product(address_for(found[0], dtype, dtype), found[1])
