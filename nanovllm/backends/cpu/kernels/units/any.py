"""The unit of any processor: products of few rows in float32. The rules are in pointwise.py."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nanovllm.backends.cpu.jit import Kernel, compiled
from nanovllm.backends.cpu.kernels.llvm.dot import FLOAT32, dot_rows
from nanovllm.backends.cpu.kernels.primitives import array, f32, load_bias

# Outputs of a block of the packed weight, and the inputs of a block that all rows are multiplied
# with before the next ones. Their weights take 16 kB of a cache.
WIDTH, INPUTS = 64, 64


@dataclass(eq=False)
class Unit:
    """Products of few rows, for processors that have the same instructions."""

    # The kernel of products, which reads blocks of `width` outputs of a packed weight.
    linear_blocks: Kernel
    width: int
    # Returns whether Numba compiles for this processor, and this process can use the unit.
    is_available: Callable[[], bool]


@compiled()
def linear_blocks(x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example,
                  start, stop):
    """Compute blocks of 64 outputs in float32, as kernels/product.py describes.

    oneDNN packs W as [outputs / 64, inputs, 64]. The sums of up to 6 rows and 16 outputs fit into
    the 16 registers of AVX2. The rows of x are divided into panels of the same height, and the last
    row fills the last panel. A panel is stored as [inputs, height]: rows that begin a multiple of
    4 kB apart would all have the same place in a cache.

    The first panel reads weights from memory, and the others read them from the cache. All panels
    together prefetch the next ones, one line in each step, to keep memory busy meanwhile. For one
    row the processor's own prefetching is faster.
    """
    out = array(out_ptr, (rows, outputs), f32(0))
    height = 1 if rows == 1 else 4 if rows <= 4 or 7 <= rows <= 8 else 6
    panels = (rows + height - 1) // height
    columns = 64 if height == 1 else 16  # outputs at a time
    x = array(x_ptr, (rows, inputs), f32(0))
    packed = np.empty((panels, inputs, height), f32)
    for panel in range(panels):
        for r in range(height):
            row = min(panel * height + r, rows - 1)
            for i in range(inputs):
                packed[panel, i, r] = x[row, i]
    acc, bias = np.empty((panels * height, WIDTH), f32), np.zeros(WIDTH, f32)
    for block in range(start, stop):
        o = WIDTH * block
        count = min(WIDTH, outputs - o)
        load_bias(bias_ptr, o, bias[:count], f32(0))
        for r in range(panels * height):
            for c in range(WIDTH):
                acc[r, c] = bias[c]
        for first in range(0, inputs, INPUTS):
            steps = min(INPUTS, inputs - first)
            weights = weight_ptr + 4 * WIDTH * (block * inputs + first)
            ahead, stride = weights + 4 * WIDTH * steps, 64 // panels
            for panel in range(panels):
                x_panel = np.int64(packed[panel, first:].ctypes.data), 4, 4 * height
                sums = np.int64(acc[panel * height :].ctypes.data)
                for c in range(0, WIDTH, columns):
                    w, to = (weights + 4 * c, 4 * WIDTH), (sums + 4 * c, 4 * WIDTH)
                    if height == 6:
                        dot_rows(FLOAT32, 6, 1, 1, x_panel, w, steps, to, (ahead, stride, 1))
                    elif height == 4:
                        dot_rows(FLOAT32, 4, 1, 1, x_panel, w, steps, to, (ahead, stride, 1))
                    else:
                        dot_rows(FLOAT32, 1, 4, 1, x_panel, w, steps, to, (0, 0, 0))
                    ahead += stride * steps
        for row in range(rows):
            for c in range(count):
                out[row, o + c] = acc[row, c]


ANY = Unit(linear_blocks, WIDTH, lambda: True)
