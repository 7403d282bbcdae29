"""The unit of processors with AVX512-BF16 and without AMX: products of few rows in bfloat16.

The rules and shapes are in kernels/pointwise.py. LLVM compiles this kernel only for a processor
with these instructions. A product of few rows takes as long as reading its weights. On the 2 cores
of an EPYC, oneDNN reads 16 GB/s of them for one row and this kernel 27; docs/measurements.md has
more rows.
"""

import numpy as np

from nanovllm.backends.cpu.jit import compiled, has_feature
from nanovllm.backends.cpu.kernels.llvm.dot import BF16, dot_rows
from nanovllm.backends.cpu.kernels.primitives import BFLOAT16, array, f32, from_float32, load_bias
from nanovllm.backends.cpu.kernels.units.any import Unit

WIDTH = 64  # outputs of a block of the packed weight: four vectors of 16
# With several panels of rows, a product takes this many inputs of a block at a time. Their weights,
# 8 kB, are also how far ahead any product prefetches.
INPUTS = 64


@compiled()
def linear_blocks(x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, outputs, example,
                  start, stop):
    """Compute blocks of 64 outputs, as kernels/product.py describes.

    oneDNN packs W as [outputs / 64, inputs / 2, 64, 2]. The rows of x are divided into panels of
    the same height, so the last panel may start early and compute some rows again.

    Of several panels, the first one reads 8 kB of weights from memory, and the others read them
    from the cache. To keep memory busy meanwhile, the panels share the prefetch of the next 8 kB:
    two or three take half each, four and more a quarter each.
    """
    out = array(out_ptr, (rows, outputs), BFLOAT16)
    height = 1 if rows < 2 else 2 if rows < 4 else 4 if rows == 5 or rows % 4 == 0 else 6
    panels = (rows + height - 1) // height
    span = inputs if panels == 1 else INPUTS
    lines = (panels + 3) // panels  # of the four cache lines of a step, what a panel prefetches
    acc, bias = np.empty((panels * height, WIDTH), f32), np.zeros(WIDTH, f32)
    for block in range(start, stop):
        o = WIDTH * block
        count = min(WIDTH, outputs - o)
        load_bias(bias_ptr, o, bias[:count], BFLOAT16)
        # The error message of `acc[:] = bias` would take seconds to compile.
        for i in range(panels * height):
            for c in range(WIDTH):
                acc[i, c] = bias[c]
        for first in range(0, inputs, span):
            steps = min(span, inputs - first) // 2
            weights = weight_ptr + 2 * WIDTH * (block * inputs + first)
            w = weights, 4 * WIDTH
            for panel in range(panels):
                row = min(panel * height, rows - height)
                x = x_ptr + 2 * (row * inputs + first), 2 * inputs, 4
                to = np.int64(acc[panel * height :].ctypes.data), 4 * WIDTH
                # Beyond 4, this is the beginning of the weights after the next ones.
                fetched = min(panel * lines, 4)
                ahead = weights + 2 * WIDTH * INPUTS + fetched * 64 * steps, 64 * lines, lines
                if height == 6:
                    dot_rows(BF16, 6, 4, 1, x, w, steps, to, ahead)
                elif height == 4:
                    dot_rows(BF16, 4, 4, 1, x, w, steps, to, ahead)
                elif height == 2:
                    dot_rows(BF16, 2, 4, 2, x, w, steps, to, ahead)
                else:
                    dot_rows(BF16, 1, 4, 4, x, w, steps, to, ahead)
        for panel in range(panels):
            row = min(panel * height, rows - height)
            for i in range(height):
                result = out[row + i, o : o + count]
                for c in range(count):
                    result[c] = from_float32(acc[panel * height + i, c], BFLOAT16)


AVX512 = Unit(linear_blocks, WIDTH, lambda: has_feature("avx512bf16"))
