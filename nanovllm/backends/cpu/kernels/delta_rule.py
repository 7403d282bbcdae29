"""Linear attention on a CPU; features/models/hybrid/delta_rule.py has it in plain torch.

These are the gated delta rule, the convolution before it and the norm after it, token by token. For
512 tokens with the heads of Qwen3.5-0.8B this takes 6.6 ms, and triangular systems of 64 tokens
took 10.2: the state of a head stays in a cache of the core. A decode step reads and writes the
whole state of a sequence: 37 MB for Qwen3.5-0.8B. The kernel reads it from memory once, while it
computes the head before. The rules and shapes of kernels are in pointwise.py;
features/models/hybrid/delta_rule.py explains Hk, Hv, Dk, Dv and C.
"""

from typing import Any

import numpy as np
from torch import Tensor

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.parallel import run
from nanovllm.backends.cpu.kernels.primitives import (
    DTYPE_EXAMPLE,
    array,
    exp,
    f32,
    from_float32,
    prefetch_range,
    to_float32,
)


@compiled()
def unit_length(head, factor):
    """Give head [Dk] the length `factor`."""
    squares = f32(0)
    for c in range(len(head)):
        squares += head[c] * head[c]
    scale = f32(factor) / np.sqrt(squares + f32(1e-6))
    for c in range(len(head)):
        head[c] *= scale


@compiled()
def convolve(before, new, weight, first, out, example):
    """Compute out [n], the silu of the convolution of four tokens, for the channels from `first`.

    The state before [3, C], which precedes the token new [C or more], advances. weight [4, C].
    """
    a, b, c, d = before[0, first:], before[1, first:], before[2, first:], new[first:]
    wa, wb, wc, wd = weight[0, first:], weight[1, first:], weight[2, first:], weight[3, first:]
    for i in range(len(out)):
        total = to_float32(a[i]) * wa[i] + to_float32(b[i]) * wb[i]
        total += to_float32(c[i]) * wc[i] + to_float32(d[i]) * wd[i]
        out[i] = to_float32(from_float32(total / (f32(1) + exp(-total)), example))
    for i in range(len(out)):
        a[i], b[i], c[i] = b[i], c[i], d[i]


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
def advance_heads(
    x_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, conv_ptr, rule_ptr, segments, out_ptr,
    num_tokens, width, num_states, key_heads, value_heads, key_dim, value_dim, eps, example, start,
    stop,
):
    """Compute out [T, Hv Dv] for segments [S, 3] of tokens: the state, the first token, the end.

    The items are key heads of segments, each with its value heads. x [T, width] begins with the
    projections of a token. weight [4, C] is of the convolution. The states, which advance, are conv
    [num_states, 3, C] and rule [num_states, Hv, Dk, Dv], where Dk is a multiple of 4: each load of
    a sum serves four rows of the state.
    """
    group = value_heads // key_heads
    keys = key_heads * key_dim
    size = value_heads * value_dim
    channels = 2 * keys + size
    x = array(x_ptr, (num_tokens, width), example)
    weight = array(weight_ptr, (4, channels), f32(0))
    a_log = array(a_log_ptr, (value_heads,), f32(0))
    dt_bias = array(dt_bias_ptr, (value_heads,), f32(0))
    norm = array(norm_ptr, (value_dim,), f32(0))
    out = array(out_ptr, (num_tokens, size), example)
    conv = array(conv_ptr, (num_states, 3, channels), example)
    rule = array(rule_ptr, (num_states, value_heads, key_dim, value_dim), f32(0))
    q, k, v = np.empty(key_dim, f32), np.empty(key_dim, f32), np.empty(value_dim, f32)
    difference = np.empty(value_dim, f32)
    o = np.empty(value_dim, f32)
    for item in range(start, stop):
        key_head = item % key_heads
        row = segments[item // key_heads, 0]
        first, last = segments[item // key_heads, 1], segments[item // key_heads, 2]
        for t in range(first, last):
            before = conv[row]
            new = x[t]
            at = key_head * key_dim
            convolve(before, new, weight, at, q, example)
            convolve(before, new, weight, keys + at, k, example)
            unit_length(q, f32(1) / np.sqrt(f32(key_dim)))
            unit_length(k, f32(1))
            for h in range(key_head * group, (key_head + 1) * group):
                convolve(before, new, weight, 2 * keys + h * value_dim, v, example)
                b = to_float32(new[channels + size + h])
                a = to_float32(new[channels + size + value_heads + h])
                beta = f32(1) / (f32(1) + exp(-b))
                a += dt_bias[h]
                softplus = a if a > f32(20) else f32(np.log1p(np.exp(np.float64(a))))
                decay = exp(-exp(a_log[h]) * softplus)
                state = rule[row, h]
                ahead = rule[row, h].ctypes.data
                lines = 0
                if t == last - 1 and (item + 1 < stop or h % group + 1 < group):
                    later = item * group + h % group + 1
                    other = rule[segments[later // value_heads, 0], later % value_heads]
                    ahead, lines = other.ctypes.data, 4 * value_dim
                difference[:] = f32(0)
                o[:] = f32(0)
                for r in range(0, key_dim, 4):
                    s0, s1, s2, s3 = state[r], state[r + 1], state[r + 2], state[r + 3]
                    k0, k1, k2, k3 = k[r], k[r + 1], k[r + 2], k[r + 3]
                    for c in range(value_dim):
                        difference[c] += k0 * s0[c] + k1 * s1[c] + k2 * s2[c] + k3 * s3[c]
                for c in range(value_dim):
                    difference[c] = beta * (v[c] - decay * difference[c])
                for r in range(0, key_dim, 4):
                    prefetch_range(np.int64(ahead) + r * lines, 4 * lines)
                    s0, s1, s2, s3 = state[r], state[r + 1], state[r + 2], state[r + 3]
                    k0, k1, k2, k3 = k[r], k[r + 1], k[r + 2], k[r + 3]
                    q0, q1, q2, q3 = q[r], q[r + 1], q[r + 2], q[r + 3]
                    for c in range(value_dim):
                        d = difference[c]
                        u0, u1 = decay * s0[c] + k0 * d, decay * s1[c] + k1 * d
                        u2, u3 = decay * s2[c] + k2 * d, decay * s3[c] + k3 * d
                        s0[c], s1[c], s2[c], s3[c] = u0, u1, u2, u3
                        o[c] += q0 * u0 + q1 * u1 + q2 * u2 + q3 * u3
                z = new[channels + h * value_dim : channels + (h + 1) * value_dim]
                norm_head(o, z, norm, eps, out[t, h * value_dim : (h + 1) * value_dim], example)


def advance(
    layer: Any, x: Tensor, conv: Tensor, rule: Tensor, segments: np.ndarray, out: Tensor
) -> None:
    """Compute out [T, Hv Dv] for x [T, C + Hv Dv + 2 Hv] and segments [S, 3], in place."""
    key_heads, value_heads, key_dim, value_dim = layer.sizes
    x = x.contiguous()
    num_tokens = int((segments[:, 2] - segments[:, 1]).sum())
    tensors = x, layer.conv1d, layer.a_log, layer.dt_bias, layer.norm, conv, rule
    addresses = *(t.data_ptr() for t in tensors), segments, out.data_ptr()
    sizes = *x.shape, len(rule), *layer.sizes
    arguments = (*addresses, *sizes, layer.eps, DTYPE_EXAMPLE[x.dtype])
    items = len(segments) * key_heads
    elements = value_heads * key_dim * value_dim
    run(advance_heads, arguments, items, num_tokens * elements)


def of_rows(rows: np.ndarray) -> np.ndarray:
    """Return the segments [S, 3] of one token of each of the sequences in `rows` [S]."""
    tokens = np.arange(len(rows))
    return np.stack((rows, tokens, tokens + 1), axis=1)


def decode(layer: Any, x: Tensor, conv: Tensor, rule: Tensor, rows: Tensor) -> Tensor:
    """Compute one token of each of the sequences in `rows` [S], in place.

    Arguments and result are as in features/models/hybrid/delta_rule.py.
    """
    out = x.new_empty((len(x), layer.sizes[1] * layer.sizes[3]))
    advance(layer, x, conv, rule, of_rows(rows.numpy()), out)
    return out


def chunk(layer: Any, x: Tensor, conv: Tensor, rule: Tensor, segments: Any, out: Tensor) -> None:
    """Compute many tokens of each sequence, as in features/models/hybrid/delta_rule.py."""
    table = np.stack((segments.rows, segments.starts, segments.ends), axis=1)
    for row, is_first in zip(segments.rows, segments.is_first, strict=True):
        if is_first:
            conv[row], rule[row] = 0, 0
    advance(layer, x, conv, rule, table, out)
