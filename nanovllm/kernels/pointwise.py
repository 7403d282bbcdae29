"""Residual add with RMSNorm, and SwiGLU's gate: each one pass over memory instead of several.

Owns: nothing. Given: activations. Mutates: nothing. Their references are the plain-torch functions
of nanovllm.layers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.layers.activation import silu_and_mul as silu_and_mul_reference
from nanovllm.layers.norm import add_rms_norm as add_rms_norm_reference

COLUMNS = 1024  # of the gate, in one program


@triton.jit
def _add_rms_norm(
    x, residual, weight, out, total, eps, E: tl.constexpr, E_PAD: tl.constexpr, ADD: tl.constexpr
):
    dtype = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * E
    column = tl.arange(0, E_PAD)
    mask = column < E
    value = tl.load(x + row + column, mask=mask, other=0.0)
    if ADD:
        before = tl.load(residual + row + column, mask=mask, other=0.0)
        # Rounded as torch's sum is: the norm must see what the next layer will.
        value = (value.to(tl.float32) + before.to(tl.float32)).to(dtype)
        tl.store(total + row + column, value, mask=mask)
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / E + eps)
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    normed = (wide * inverse).to(dtype).to(tl.float32) * scale
    tl.store(out + row + column, normed.to(dtype), mask=mask)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(RMSNorm(x + residual) * weight, x + residual); without a residual x itself. x [T, E]."""
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    size = x.shape[-1]
    pad = triton.next_power_of_2(size)
    _add_rms_norm[(x.shape[0],)](
        x, x if residual is None else residual, weight, out, total, eps,
        E=size, E_PAD=pad, ADD=residual is not None, num_warps=4 if pad <= 2048 else 8,
    )  # fmt: skip
    return out, total


@triton.jit
def _silu_and_mul(x, out, F: tl.constexpr, COLUMNS: tl.constexpr):
    dtype = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < F
    gate = tl.load(x + row * 2 * F + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + column, mask=mask, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * F + column, (opened * up).to(dtype), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2F] = (gate, up) side by side -> silu(gate) * up [T, F]."""
    tokens, width = x.shape
    out = torch.empty((tokens, width // 2), dtype=x.dtype, device=x.device)
    _silu_and_mul[(tokens, triton.cdiv(width // 2, COLUMNS))](
        x, out, F=width // 2, COLUMNS=COLUMNS, num_warps=4
    )
    return out


__all__ = ["add_rms_norm", "add_rms_norm_reference", "silu_and_mul", "silu_and_mul_reference"]
