"""RMSNorm with the residual addition before it, and SwiGLU's gate, each in one pass over memory.

Their references are the functions of the same names in models/layers.py.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.gpu.kernels.launch import launch

# Elements of the gate that one program computes.
COLUMNS = tl.constexpr(1024)


@triton.jit
def _add_rms_norm(x, residual, weight, out, total, eps, E: tl.constexpr, ADD: tl.constexpr):
    """One program computes one token."""
    dtype = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * E
    column = tl.arange(0, triton.next_power_of_2(E))
    mask = column < E
    value = tl.load(x + row + column, mask=mask, other=0.0)
    if ADD:
        addend = tl.load(residual + row + column, mask=mask, other=0.0)
        # As in PyTorch, the norm gets the rounded sum, which is also the next residual.
        value = (value.to(tl.float32) + addend.to(tl.float32)).to(dtype)
        tl.store(total + row + column, value, mask=mask)
    value = value.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value, 0) / E + eps)
    scale = tl.load(weight + column, mask=mask, other=0.0)
    normed = (value * inverse_rms).to(scale.dtype).to(tl.float32) * scale.to(tl.float32)
    tl.store(out + row + column, normed.to(dtype), mask=mask)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm(x + residual) * weight, x + residual), arXiv:1910.07467; both [T, E].

    x, residual [T, E] and weight [E] are contiguous. Without a residual, the second result is x.
    """
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    num_tokens, size = x.shape
    args = (x, x if residual is None else residual, weight, out, total, eps)
    constants = dict(E=size, ADD=residual is not None)
    num_warps = 4 if size <= 2048 else 8
    launch(_add_rms_norm, (num_tokens, 1, 1), args, constants, num_warps=num_warps)
    return out, total


@triton.jit
def _silu_and_mul(x, out, F: tl.constexpr, GELU: tl.constexpr):
    """One program computes COLUMNS elements of one token.

    Both functions are gate * sigmoid(y), because 0.5 + 0.5 tanh(y / 2) is sigmoid(y).
    """
    dtype = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < F
    gate = tl.load(x + row * 2 * F + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + column, mask=mask, other=0.0).to(tl.float32)
    y = gate * (1.5957691216 + 0.0713548163 * gate * gate) if GELU else gate
    activated = (gate / (1.0 + tl.exp(-y))).to(dtype).to(tl.float32)
    tl.store(out + row * F + column, (activated * up).to(dtype), mask=mask)


def silu_and_mul(x: Tensor, gelu: bool = False) -> Tensor:
    """Return silu(gate) * up [T, F] of x [T, 2F] = (gate, up), contiguous (arXiv:2002.05202).

    With `gelu`, as F.gelu(approximate="tanh").
    """
    num_tokens, width = x.shape
    out = torch.empty((num_tokens, width // 2), dtype=x.dtype, device=x.device)
    grid = (num_tokens, -(-width // (2 * COLUMNS.value)), 1)
    launch(_silu_and_mul, grid, (x, out), dict(F=width // 2, GELU=gelu), num_warps=4)
    return out


gelu_and_mul = partial(silu_and_mul, gelu=True)
