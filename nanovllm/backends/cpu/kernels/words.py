"""The operands of attention's two products, and the layout of a block of the KV cache.

A product reads words of 4 bytes: two numbers if the cache is in bfloat16, and one in float32, which
fp8 becomes. The cache [blocks, K, B, D] has the slots of a head in a block in tiles of 16, whose
keys are stored as words by token, and whose values as words of neighboring tokens. So a product
reads them in the order in which they lie in memory:

    keys [D / n, 16, n]      token    0       1    ..   15         n = 2 numbers of a word
        dims 0 and 1              [ k  k | k  k | .. | k  k ]
        dims 2 and 3              [ k  k | k  k | .. | k  k ]

    values [16 / n, D, n]    dim      0       1    ..  D - 1
        tokens 0 and 1            [ v  v | v  v | .. | v  v ]
        tokens 2 and 3            [ v  v | v  v | .. | v  v ]

If B or D is no multiple of 16, the slots are not in tiles but rows [B, D], which takes longer.
"""

import numpy as np
from numba import types

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.primitives import by_type, bytes_of, to_float32

TILE = 16  # slots


@compiled()
def is_tiled(block_size, dim):
    return block_size % TILE == 0 and dim % TILE == 0


@compiled()
def per_word(example):
    """Return how many numbers of the cache are a word."""
    return 2 if bytes_of(example) == 2 else 1


@compiled()
def key_place(slot, d, dim, tiled, n):
    """Return the place of a number of a key among those of a head in a block."""
    if not tiled:
        return slot * dim + d
    return slot // TILE * TILE * dim + (d // n * TILE + slot % TILE) * n + d % n


@compiled()
def value_place(slot, d, dim, tiled, n):
    """Return the place of a number of a value among those of a head in a block."""
    if not tiled:
        return slot * dim + d
    return (slot // n * dim + d) * n + slot % n


@by_type
def operands(shape, example):
    """Return an uninitialized array for the numbers of words."""
    dtype = np.uint16 if example == types.uint16 else np.float32
    return lambda shape, example: np.empty(shape, dtype)


@by_type
def operand(number, example):
    """Convert a stored number to a number of a word."""
    if example == types.uint16:
        return lambda number, example: number
    return lambda number, example: to_float32(number)
