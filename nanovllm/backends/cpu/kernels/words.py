"""Words: the operands of the two products of attention.

A word is a number in float32, or a pair in bfloat16 if `example`, a number of the KV cache, is in
bfloat16 and the processor multiplies pairs (AVX512-BF16).
"""

import numpy as np
from numba import types
from numba.extending import overload

from nanovllm.backends.cpu.jit import has_feature
from nanovllm.backends.cpu.kernels.primitives import to_float32

HAS_PAIRS = has_feature("avx512bf16")


def in_pairs(example):
    return HAS_PAIRS and example == types.uint16


def word_array(shape, example):
    """Return an array of zeros for words."""
    raise NotImplementedError("compiled code only")


@overload(word_array)
def _word_array(shape, example):
    dtype = np.uint32 if in_pairs(example) else np.float32
    return lambda shape, example: np.zeros(shape, dtype)


def factor_array(shape, example):
    """Return an uninitialized array for the numbers of which words are made."""
    raise NotImplementedError("compiled code only")


@overload(factor_array)
def _factor_array(shape, example):
    dtype = np.uint16 if in_pairs(example) else np.float32
    return lambda shape, example: np.empty(shape, dtype)


def stored_word(number, example):
    """Return a word as it is stored in memory, of numbers like `number`."""
    raise NotImplementedError("compiled code only")


@overload(stored_word)
def _stored_word(number, example):
    if in_pairs(example):
        return lambda number, example: np.uint32(0)
    return lambda number, example: number


def word(stored):
    """Convert a word as it is stored."""
    raise NotImplementedError("compiled code only")


@overload(word)
def _word(stored):
    is_pair = stored == types.uint32
    return (lambda stored: stored) if is_pair else lambda stored: to_float32(stored)


def joined(a, b, example):
    """Return the word of two stored numbers, or of the first one if a word is one number."""
    raise NotImplementedError("compiled code only")


@overload(joined)
def _joined(a, b, example):
    def pair(a, b, example):
        return np.uint32(a) | (np.uint32(b) << np.uint32(16))

    if in_pairs(example):
        return pair
    return lambda a, b, example: to_float32(a)
