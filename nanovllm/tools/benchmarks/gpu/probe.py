"""The kernels that launches.py times: an empty one, and a product of one row."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from nanovllm.backends.gpu.kernels.launch import COMPILE_OPTIONS


@triton.jit
def _empty(x, WAIT: tl.constexpr, TRIGGER_FIRST: tl.constexpr):
    """WAIT: for the previous kernel. TRIGGER_FIRST: let the next kernel start before that."""
    if WAIT and TRIGGER_FIRST:
        cuda.gdc_launch_dependents()
    if WAIT:
        cuda.gdc_wait()
    if WAIT and not TRIGGER_FIRST:
        cuda.gdc_launch_dependents()


@triton.jit
def _gemv(
    x, weight, out,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, WAIT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes OUTPUTS values of out = weight x, with all of its weights in registers.

    WAIT: for the previous kernel, which wrote x. EARLY: load the weights before that.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, WIDTH)[None, :]
    pointers = weight + output[:, None] * INPUTS + column
    held = ()
    if EARLY:
        for start in tl.static_range(0, INPUTS, WIDTH):
            held += (tl.load(pointers + start),)  # type: ignore[assignment]
    if WAIT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if not EARLY:
        for start in tl.static_range(0, INPUTS, WIDTH):
            held += (tl.load(pointers + start),)  # type: ignore[assignment]
    total = tl.zeros([OUTPUTS, WIDTH], tl.float32)
    for i in tl.static_range(INPUTS // WIDTH):
        values = tl.load(tl.broadcast_to(x + i * WIDTH + column, [OUTPUTS, WIDTH]))
        total += held[i].to(tl.float32) * values.to(tl.float32)
    tl.store(out + output, tl.sum(total, 1).to(out.dtype.element_ty))


def empty(x: Tensor, programs: int, programmatic: bool, wait: bool, trigger_first: bool) -> None:
    """Launch a kernel that does nothing. x is any tensor of the GPU."""
    options = {"launch_pdl": True} if programmatic else {}
    _empty[(programs, 1, 1)](
        x, WAIT=wait, TRIGGER_FIRST=trigger_first, **options, **COMPILE_OPTIONS
    )


def gemv(x: Tensor, weight: Tensor, out: Tensor, wait: bool, early: bool) -> None:
    """Write weight [O, I] times the first I values of x to `out` [O].

    O is a multiple of 16, and I of 256 or a smaller power of 2. wait: as a programmatic launch.
    """
    outputs, inputs = weight.shape
    tile = dict(OUTPUTS=16 if outputs >= 4096 else 8, WIDTH=min(256, inputs & -inputs))
    options = {"launch_pdl": True} if wait else {}
    _gemv[(outputs // tile["OUTPUTS"], 1, 1)](
        x, weight, out, INPUTS=inputs, **tile, WAIT=wait, EARLY=early, num_warps=8, **options,
        **COMPILE_OPTIONS,
    )
