"""Linear attention on a CPU; features/models/hybrid/delta_rule.py has it in plain torch.

These are the gated delta rule, the convolution before it and the norm after it. A decode step reads
and writes the whole state of a sequence: 37 MB for Qwen3.5-0.8B. The kernel reads it from memory
once, and again from the cache of the core, while the next head is prefetched. The rules and shapes
of kernels are in pointwise.py; features/models/hybrid/delta_rule.py explains Hk, Hv, Dk, Dv and C.
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
    prefetch_range,
    to_float32,
)

CHUNK = 64  # tokens of a triangular system


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


@compiled()
def decode_heads(
    x_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, conv_ptr, rule_ptr, rows_ptr, out_ptr,
    num_rows, width, num_states, key_heads, value_heads, key_dim, value_dim, eps, example, start,
    stop,
):
    """Compute out [S, Hv Dv] and advance the states of `rows` [S] int64 by one token.

    The items are key heads of rows, each with its value heads. x [S, width] begins with the
    projections of a token. weight [4, C] is of the convolution. The states are conv
    [num_states, 3, C] and rule [num_states, Hv, Dk, Dv].
    """
    group, keys, size = value_heads // key_heads, key_heads * key_dim, value_heads * value_dim
    channels = 2 * keys + size
    x = array(x_ptr, (num_rows, width), example)
    weight = array(weight_ptr, (4, channels), f32(0))
    a_log = array(a_log_ptr, (value_heads,), f32(0))
    dt_bias = array(dt_bias_ptr, (value_heads,), f32(0))
    norm, out = array(norm_ptr, (value_dim,), f32(0)), array(out_ptr, (num_rows, size), example)
    conv = array(conv_ptr, (num_states, 3, channels), example)
    rule = array(rule_ptr, (num_states, value_heads, key_dim, value_dim), f32(0))
    rows = array(rows_ptr, (num_rows,), np.int64(0))
    qk, v = np.empty(2 * key_dim, f32), np.empty(value_dim, f32)
    q, k = qk[:key_dim], qk[key_dim:]
    difference, o = np.empty(value_dim, f32), np.empty(value_dim, f32)
    for item in range(start * group, stop * group):
        i, h = item // value_heads, item % value_heads
        before, new = conv[rows[i]], x[i]
        if h % group == 0:
            first = h // group * key_dim
            convolve_next(before, new, weight, first, q, example)
            convolve_next(before, new, weight, keys + first, k, example)
            scale_heads(qk, 1, key_dim)
        convolve_next(before, new, weight, 2 * keys + h * value_dim, v, example)
        b = to_float32(new[channels + size + h])
        a = to_float32(new[channels + size + value_heads + h])
        beta = f32(1) / (f32(1) + exp(-b))
        a += dt_bias[h]
        softplus = a if a > f32(20) else f32(np.log1p(np.exp(np.float64(a))))
        decay = exp(-exp(a_log[h]) * softplus)
        state, later = rule[rows[i], h], min(item + 1, stop * group - 1)
        ahead = rule[rows[later // value_heads], later % value_heads].ctypes.data
        difference[:] = f32(0)
        o[:] = f32(0)
        for r in range(key_dim):
            for c in range(value_dim):
                difference[c] += state[r, c] * k[r]
        for c in range(value_dim):
            difference[c] = beta * (v[c] - decay * difference[c])
        for r in range(key_dim):
            prefetch_range(np.int64(ahead) + 4 * r * value_dim, 4 * value_dim)
            for c in range(value_dim):
                updated = decay * state[r, c] + k[r] * difference[c]
                state[r, c] = updated
                o[c] += updated * q[r]
        z = new[channels + h * value_dim : channels + (h + 1) * value_dim]
        norm_head(o, z, norm, eps, out[i, h * value_dim : (h + 1) * value_dim], example)


@compiled()
def solve_chunks(
    mixed_ptr, beta_ptr, g_ptr, values_ptr, keys_ptr, scores_ptr, q_ptr, k_ptr, decay_ptr,
    num_tokens, num_chunks, size, key_heads, value_heads, key_dim, value_dim, start, stop,
):
    """Compute the tensors of `Solved` from mixed [Q, C], beta and g [Q, Hv], all in float32.

    The items are chunks of value heads. The forward substitution works on rows in the cache.
    """
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    mixed = array(mixed_ptr, (num_tokens, channels), f32(0))
    all_beta = array(beta_ptr, (num_tokens, value_heads), f32(0))
    all_g = array(g_ptr, (num_tokens, value_heads), f32(0))
    items = value_heads * num_chunks
    all_values = array(values_ptr, (items, size, value_dim), f32(0))
    all_keys = array(keys_ptr, (items, size, key_dim), f32(0))
    all_scores = array(scores_ptr, (items, size, size), f32(0))
    all_q = array(q_ptr, (items, size, key_dim), f32(0))
    all_k = array(k_ptr, (items, size, key_dim), f32(0))
    decays = array(decay_ptr, (items,), f32(0))
    total = np.empty(size, f32)
    for item in range(start, stop):
        h, first = item // num_chunks, item % num_chunks * size
        at = h // (value_heads // key_heads) * key_dim
        k_at, v_at = key_heads * key_dim + at, 2 * key_heads * key_dim + h * value_dim
        num = min(size, num_tokens - first)
        values, keys, scores = all_values[item], all_keys[item], all_scores[item]
        q_out, k_out, sum_g = all_q[item], all_k[item], f32(0)
        for i in range(num):
            row = mixed[first + i]
            q, k = row[at : at + key_dim], row[k_at : k_at + key_dim]
            v = row[v_at : v_at + value_dim]
            beta = all_beta[first + i, h]
            sum_g += all_g[first + i, h]
            total[i] = sum_g
            power = exp(sum_g)
            value, key, score = values[i], keys[i], scores[i]
            for c in range(value_dim):
                value[c] = beta * v[c]
            for c in range(key_dim):
                key[c] = beta * power * k[c]
                q_out[i, c] = power * q[c]
            # Each load of q, k, value and key serves the products of four earlier tokens.
            blocks = i // 4 * 4
            for j in range(0, blocks, 4):
                a, b = mixed[first + j, k_at:], mixed[first + j + 1, k_at:]
                d, e = mixed[first + j + 2, k_at:], mixed[first + j + 3, k_at:]
                ka = kb = kd = ke = qa = qb = qd = qe = f32(0)
                for c in range(key_dim):
                    ka, kb = ka + k[c] * a[c], kb + k[c] * b[c]
                    kd, ke = kd + k[c] * d[c], ke + k[c] * e[c]
                    qa, qb = qa + q[c] * a[c], qb + q[c] * b[c]
                    qd, qe = qd + q[c] * d[c], qe + q[c] * e[c]
                pa, pb = exp(sum_g - total[j]), exp(sum_g - total[j + 1])
                pd, pe = exp(sum_g - total[j + 2]), exp(sum_g - total[j + 3])
                score[j], score[j + 1] = qa * pa, qb * pb
                score[j + 2], score[j + 3] = qd * pd, qe * pe
                ka, kb, kd, ke = beta * ka * pa, beta * kb * pb, beta * kd * pd, beta * ke * pe
                a, b, d, e = values[j], values[j + 1], values[j + 2], values[j + 3]
                for c in range(value_dim):
                    value[c] -= ka * a[c] + kb * b[c] + kd * d[c] + ke * e[c]
                a, b, d, e = keys[j], keys[j + 1], keys[j + 2], keys[j + 3]
                for c in range(key_dim):
                    key[c] -= ka * a[c] + kb * b[c] + kd * d[c] + ke * e[c]
            for j in range(blocks, i + 1):
                other = mixed[first + j, k_at : k_at + key_dim]
                k_product, q_product = f32(0), f32(0)
                for c in range(key_dim):
                    k_product += k[c] * other[c]
                    q_product += q[c] * other[c]
                decay = exp(sum_g - total[j])
                score[j] = q_product * decay
                if j < i:
                    factor = beta * k_product * decay
                    other_value, other_key = values[j], keys[j]
                    for c in range(value_dim):
                        value[c] -= factor * other_value[c]
                    for c in range(key_dim):
                        key[c] -= factor * other_key[c]
            score[i + 1 :] = f32(0)
        for i in range(num):
            power = exp(sum_g - total[i])
            k = mixed[first + i, k_at : k_at + key_dim]
            for c in range(key_dim):
                k_out[i, c] = power * k[c]
        for padded in (values, keys, scores, q_out, k_out):
            padded[num:] = f32(0)
        decays[item] = exp(sum_g)


def solve(layer: Any, mixed: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Solve the triangular systems of Q tokens, from mixed [Q, C], beta and g [Q, Hv].

    Returns the tensors of `Solved`, in its order.
    """
    _, value_heads, key_dim, value_dim = layer.sizes
    num, size = len(mixed), min(CHUNK, len(mixed))
    num_chunks = -(-num // size)
    shape = value_heads, num_chunks, size
    solved = tuple(
        mixed.new_empty((*shape, d)) for d in (value_dim, key_dim, size, key_dim, key_dim)
    )
    decay = mixed.new_empty((value_heads, num_chunks, 1, 1))
    tensors = mixed, beta.contiguous(), g.contiguous(), *solved, decay
    arguments = (*(t.data_ptr() for t in tensors), num, num_chunks, size, *layer.sizes)
    items = value_heads * num_chunks
    run(solve_chunks, arguments, items, items * size * size * key_dim)
    return *solved, decay


def decode(layer: Any, x: Tensor, conv: Tensor, rule: Tensor, rows: Tensor) -> Tensor:
    """Compute one token of each of the sequences in `rows` [S], in place.

    Arguments and result are as in features/models/hybrid/delta_rule.py.
    """
    key_heads, value_heads, key_dim, value_dim = layer.sizes
    (num_rows, width), x = x.shape, x.contiguous()
    out = x.new_empty((num_rows, value_heads * value_dim))
    weights = layer.conv1d, layer.a_log, layer.dt_bias, layer.norm
    tensors = x, *weights, conv, rule, rows, out
    sizes = num_rows, width, len(rule), *layer.sizes
    arguments = (*(t.data_ptr() for t in tensors), *sizes, layer.eps, DTYPE_EXAMPLE[x.dtype])
    run(decode_heads, arguments, num_rows * key_heads, num_rows * value_heads * key_dim * value_dim)
    return out
