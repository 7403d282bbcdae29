"""Functions that all kernels of a CPU use: stored numbers, arrays at addresses, exp, maximum.

NumPy has no bfloat16, so it is stored as uint16, the upper half of a float32. The type of a
kernel's argument `example` selects the stored dtype. The type of `cache_example` selects the dtype
of the KV cache, where uint8 is fp8.
"""

import numpy as np
import torch
from numba import carray, types
from numba.extending import overload

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.llvm.emit import pointer, prefetch, to_float32
from nanovllm.models.fp8 import FP8

CACHE_LINE = 64  # bytes
BFLOAT16 = np.uint16(0)
DTYPE_EXAMPLE = {torch.bfloat16: BFLOAT16, torch.float32: np.float32(0), FP8: np.uint8(0)}

f32, int32 = np.float32, np.int32


def by_type(choose):
    """Decorate a function that returns, for the types of its arguments, what kernels call."""

    def function(*arguments):
        raise NotImplementedError("compiled code only")

    overload(function)(choose)
    return function


@compiled()
def array(address, shape, example):
    """Return the array at an address, of numbers like `example`.

    The result does not own its memory. Numba frees an array after its last use by name, so take
    `.ctypes.data` inside the loop that uses the address.
    """
    return carray(pointer(address, example), shape)


@by_type
def from_float32(x, example):
    """Round float32 to a stored number: to the nearest, ties to even; in fp8 at most 448."""

    def to_bfloat16(x, example):
        bits = np.float32(x).view(np.uint32)
        rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return np.uint16((bits + rounding) >> np.uint32(16)) if x == x else np.uint16(0x7FC0)

    def to_fp8(x, example):
        size = np.float32(min(abs(np.float32(x)), f32(448)))
        bits = size.view(np.uint32)
        rounding = np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))
        normal = ((bits + rounding) >> np.uint32(20)) - np.uint32(120 << 3)
        # In a float32 near 2^14 the lowest bit is 2^-9, the unit of subnormal numbers.
        subnormal = np.float32(size + f32(2**14)).view(np.uint32) & np.uint32(0xF)
        bits = normal if size >= f32(2**-6) else subnormal
        bits = bits if x == x else np.uint32(0x7F)
        return np.uint8(bits | ((np.float32(x).view(np.uint32) >> np.uint32(24)) & np.uint32(0x80)))

    if example == types.uint8:
        return to_fp8
    return to_bfloat16 if example == types.uint16 else lambda x, example: f32(x)


@by_type
def bytes_of(example):
    """Return the bytes of a stored number."""
    size = example.bitwidth // 8
    return lambda example: size


@by_type
def cached(x, scale, cache_example):
    """Return the number of a KV cache for x: in fp8, x / scale rounded."""
    if cache_example == types.uint8:
        return lambda x, scale, cache_example: from_float32(to_float32(x) / scale, cache_example)
    return lambda x, scale, cache_example: x


@compiled()
def exp(x):
    """Return e^x for x clamped to [-87, 87]; the relative error is at most 3e-7 + 1e-7 |x|.

    LLVM vectorizes it, unlike libm's. If x / ln 2 = n + part with an integer n, then 2^n is the
    exponent of a float, and a polynomial on [0, 1) approximates 2^part: the minimax polynomial that
    is 1 at 0 and 2 - 2^-23 at 1. Then e^0 is exactly 1, and e^x is less than 1 for every x < 0.
    """
    x = min(max(x * f32(1.44269504), f32(-126)), f32(126))
    n = np.floor(x)
    part = x - n
    power = f32(1.8701225e-3) * part + f32(9.0106837e-3)
    power = (power * part + f32(5.5804454e-2)) * part + f32(2.4016321e-1)
    power = (power * part + f32(6.9315141e-1)) * part + f32(1)
    return power * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled()
def maximum(x):
    """Return the maximum of stored numbers x [n] in float32, or minus infinity if n = 0.

    A NaN counts as infinity, because min(inf, NaN) is inf.
    LLVM vectorizes a maximum of integers. With all bits but the sign of negative floats flipped,
    floats sort like integers.
    """
    top = int32(-0x7F800001)  # minus infinity
    for i in range(len(x)):
        bits = f32(min(f32(np.inf), to_float32(x[i]))).view(int32)
        top = max(top, int32(bits ^ int32(int32(bits >> int32(31)) & int32(0x7FFFFFFF))))
    return int32(top ^ int32(int32(top >> int32(31)) & int32(0x7FFFFFFF))).view(f32)


@compiled()
def prefetch_range(address, size):
    for offset in range(0, size, CACHE_LINE):
        prefetch(address + offset)
