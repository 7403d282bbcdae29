"""The convolution before the gated delta rule and the norm after it, on a CPU.

features/models/hybrid/delta_rule.py has them in plain torch, and explains Hk, Hv, Dk, Dv and C. The
rules and shapes of kernels are in backends/cpu/kernels/pointwise.py.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.parallel import run
from nanovllm.backends.cpu.kernels.primitives import (
    DTYPE_EXAMPLE,
    array,
    exp,
    f32,
    from_float32,
    to_float32,
)


@compiled()
def scale_heads(out, key_heads, key_dim):
    """Give the heads of q and k in out [C] unit length, and divide q by sqrt(Dk)."""
    for h in range(2 * key_heads):
        head = out[h * key_dim : (h + 1) * key_dim]
        squares = f32(0)
        for c in range(key_dim):
            squares += head[c] * head[c]
        scale = f32(1) / np.sqrt(squares + f32(1e-6))
        if h < key_heads:
            scale = scale / np.sqrt(f32(key_dim))
        for c in range(key_dim):
            head[c] *= scale


@compiled()
def convolve(a, b, c, d, weight, first, out, example):
    """Compute out [n], the silu of the convolution of four tokens with weight [4, C].

    It is for the channels from `first`. The tokens have C numbers or more.
    """
    a, b, c, d = a[first:], b[first:], c[first:], d[first:]
    wa, wb, wc, wd = weight[0, first:], weight[1, first:], weight[2, first:], weight[3, first:]
    for i in range(len(out)):
        total = to_float32(a[i]) * wa[i] + to_float32(b[i]) * wb[i]
        total += to_float32(c[i]) * wc[i] + to_float32(d[i]) * wd[i]
        out[i] = to_float32(from_float32(total / (f32(1) + exp(-total)), example))


@compiled()
def convolve_next(before, new, weight, first, out, example):
    """Compute out [n] like `convolve` for a token and the state before [3, C], and advance it."""
    a, b, c, d = before[0, first:], before[1, first:], before[2, first:], new[first:]
    convolve(before[0], before[1], before[2], new, weight, first, out, example)
    for i in range(len(out)):
        a[i], b[i], c[i] = b[i], c[i], d[i]


@compiled()
def convolve_tokens(
    x_ptr, weight_ptr, conv_ptr, mixed_ptr, num_tokens, width, channels, key_heads, key_dim,
    example, start, stop,
):
    """Compute mixed [T, C] in float32 from consecutive tokens x [T, width].

    The first C numbers of a token are its inputs. weight [4, C] is in float32. The state conv
    [3, C] precedes the tokens.
    """
    x = array(x_ptr, (num_tokens, width), example)
    mixed = array(mixed_ptr, (num_tokens, channels), f32(0))
    weight = array(weight_ptr, (4, channels), f32(0))
    before = array(conv_ptr, (3, channels), example)
    for t in range(start, stop):
        new, out = x[t], mixed[t]
        if t >= 3:
            convolve(x[t - 3], x[t - 2], x[t - 1], new, weight, 0, out, example)
        else:
            second = before[t + 1] if t < 2 else x[0]
            third = before[2] if t == 0 else x[t - 1]
            convolve(before[t], second, third, new, weight, 0, out, example)
        scale_heads(out, key_heads, key_dim)


@compiled()
def norm_head(o, z, norm, eps, out, example):
    """Compute out = RMSNorm(o) * silu(z), all [Dv]."""
    squares = f32(0)
    for c in range(len(o)):
        squares += o[c] * o[c]
    scale = f32(1) / np.sqrt(squares / f32(len(o)) + f32(eps))
    for c in range(len(o)):
        gate = to_float32(z[c])
        gate = gate / (f32(1) + exp(-gate))
        out[c] = from_float32(o[c] * scale * norm[c] * gate, example)


@compiled()
def gated_norm_tokens(
    o_ptr, x_ptr, norm_ptr, out_ptr, num_tokens, length, width, channels, value_heads, value_dim,
    eps, example, start, stop,
):
    """Compute out [T, Hv Dv] = RMSNorm(o) * silu(z) of o [Hv, length, Dv], where length >= T.

    x [T, width] contains z.
    """
    o = array(o_ptr, (value_heads, length, value_dim), f32(0))
    x = array(x_ptr, (num_tokens, width), example)
    norm = array(norm_ptr, (value_dim,), f32(0))
    out = array(out_ptr, (num_tokens, value_heads * value_dim), example)
    for t in range(start, stop):
        for h in range(value_heads):
            z = x[t, channels + h * value_dim : channels + (h + 1) * value_dim]
            norm_head(o[h, t], z, norm, eps, out[t, h * value_dim : (h + 1) * value_dim], example)


def convolve_chunk(layer: Any, x: Tensor, conv: Tensor) -> Tensor:
    """Return q, k and v [Q, C] of consecutive tokens, and advance the state conv [3, C]."""
    key_heads, _, key_dim, _ = layer.sizes
    channels = conv.shape[1]
    mixed = torch.empty((len(x), channels), dtype=torch.float32)
    tensors = x, layer.conv1d, conv, mixed
    sizes = *x.shape, channels, key_heads, key_dim
    arguments = (*(t.data_ptr() for t in tensors), *sizes, DTYPE_EXAMPLE[x.dtype])
    run(convolve_tokens, arguments, len(x), mixed.numel())
    conv.copy_(torch.cat((conv, x[-3:, :channels]))[-3:])
    return mixed


def gated_norm(layer: Any, o: Tensor, x: Tensor) -> Tensor:
    """Return RMSNorm(o) * silu(z) [Q, Hv Dv] in the dtype of x, of o [Hv, Q or more, Dv]."""
    _, value_heads, _, value_dim = layer.sizes
    (num, width), size = x.shape, value_heads * value_dim
    out, channels = x.new_empty((num, size)), width - size - 2 * value_heads
    tensors = o, x, layer.norm, out
    sizes = num, o.shape[1], width, channels, value_heads, value_dim
    arguments = (*(t.data_ptr() for t in tensors), *sizes, layer.eps, DTYPE_EXAMPLE[x.dtype])
    run(gated_norm_tokens, arguments, num, out.numel())
    return out
