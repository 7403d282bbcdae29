"""The exact conversion of fp8 to 16 bits, in registers.

On NVIDIA GPUs it is in PTX, the assembly language of these GPUs. Elsewhere and in Triton's
interpreter, and for other dtypes, the compiler chooses the instructions.
"""

import torch
import triton
import triton.language as tl

PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)

# It takes four numbers in $2, and returns them in pairs in $0 and $1.
FP8_TO_FLOAT16 = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
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
