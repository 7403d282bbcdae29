"""Exact conversions of numbers of one byte to 16 bits, in registers.

On NVIDIA GPUs they are in PTX, the assembly language of these GPUs. Elsewhere and in Triton's
interpreter, and for other dtypes, the compiler chooses the instructions.
"""

import torch
import triton
import triton.language as tl

PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)

# Each takes four numbers in $2, and returns them in pairs in $0 and $1.
FP8_TO_FLOAT16 = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# A byte from 0 to 255 in the lowest bits of 1,024 adds its value: 1,024 + n + 128, minus 1,152.
INT8_TO_FLOAT16 = tl.constexpr("""{
    .reg .b32 bytes, low, high, offset;
    mov.b32 offset, 0x64806480;
    xor.b32 bytes, $2, 0x80808080;
    prmt.b32 low, bytes, 0x64646464, 0x4140;
    prmt.b32 high, bytes, 0x64646464, 0x4342;
    sub.f16x2 $0, low, offset;
    sub.f16x2 $1, high, offset;
}""")
# The lowest bits of 128 have room for seven: 128 + these, minus 128, or 256 if the sign is set.
INT8_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 low, high, offset, minus_one;
    mov.b32 minus_one, 0xBF80BF80;
    prmt.b32 low, $2, 0, 0x4140;
    prmt.b32 high, $2, 0, 0x4342;
    lop3.b32 offset, low, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 low, low, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, offset, minus_one, low;
    lop3.b32 offset, high, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 high, high, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $1, offset, minus_one, high;
}""")


@triton.jit
def fp8_to(x, dtype: tl.constexpr):
    """float8e4nv -> dtype."""
    if PTX and dtype == tl.float16:
        # If it were "pure", the compiler would move it and read x from shared memory byte by byte.
        x = tl.inline_asm_elementwise(
            FP8_TO_FLOAT16, "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4
        )
    return x.to(dtype)


@triton.jit
def int8_to(x, dtype: tl.constexpr):
    """int8 -> dtype."""
    if PTX and dtype == tl.float16:
        x = tl.inline_asm_elementwise(
            INT8_TO_FLOAT16, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4
        )
    if PTX and dtype == tl.bfloat16:
        x = tl.inline_asm_elementwise(
            INT8_TO_BFLOAT16, "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return x.to(dtype)
