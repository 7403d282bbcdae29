"""The kernels that launches.py times: an empty one, and a product of one row."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.backends.gpu.kernels.launch import COMPILE_OPTIONS


@triton.jit
def _empty(x, PDL: tl.constexpr, TRIGGER_BEFORE: tl.constexpr, TRIGGER_AFTER: tl.constexpr):
    """PDL: wait for the previous kernel. The next one may start before or after that."""
    if TRIGGER_BEFORE:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    if TRIGGER_AFTER:
        gdc_launch_dependents()


@triton.jit
def _gemv(
    x, weight, out,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes OUTPUTS values of out = weight x, with all of its weights in registers.

    PDL: wait for the previous kernel, which wrote x. EARLY: load the weights before that.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, WIDTH)[None, :]
    pointers = weight + output[:, None] * INPUTS + column
    held = ()
    if EARLY:
        for start in tl.static_range(0, INPUTS, WIDTH):
            held += (tl.load(pointers + start),)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if not EARLY:
        for start in tl.static_range(0, INPUTS, WIDTH):
            held += (tl.load(pointers + start),)  # type: ignore[assignment]
    total = tl.zeros([OUTPUTS, WIDTH], tl.float32)
    for i in tl.static_range(INPUTS // WIDTH):
        values = tl.load(tl.broadcast_to(x + i * WIDTH + column, [OUTPUTS, WIDTH]))
        total += held[i].to(tl.float32) * values.to(tl.float32)
    tl.store(out + output, tl.sum(total, 1).to(out.dtype.element_ty))


def empty(x: Tensor, programs: int, pdl: bool, before: bool, after: bool) -> None:
    """Launch a kernel that does nothing. x is any tensor of the GPU.

    pdl: as a programmatic launch. before, after: when it lets the next kernel start.
    """
    options = {"launch_pdl": True} if pdl else {}
    _empty[(programs, 1, 1)](
        x, PDL=pdl, TRIGGER_BEFORE=before, TRIGGER_AFTER=after, **options, **COMPILE_OPTIONS
    )


def gemv(x: Tensor, weight: Tensor, out: Tensor, pdl: bool, early: bool) -> None:
    """Write weight [O, I] times the first I values of x to `out` [O].

    O is a multiple of 16, and I of 256 or a smaller power of 2. pdl: as a programmatic launch.
    """
    outputs, inputs = weight.shape
    tile = dict(OUTPUTS=16 if outputs >= 4096 else 8, WIDTH=min(256, inputs & -inputs))
    options = {"launch_pdl": True} if pdl else {}
    _gemv[(outputs // tile["OUTPUTS"], 1, 1)](
        x, weight, out, INPUTS=inputs, **tile, PDL=pdl, EARLY=early, num_warps=8, **options,
        **COMPILE_OPTIONS,
    )
