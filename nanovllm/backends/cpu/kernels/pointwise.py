"""Kernels for the operations between two matrix products: norm, activation, rotary embedding.

These are Python functions that Numba compiles, as Triton compiles the kernels of a GPU. Between two
products PyTorch makes about twelve calls. Each takes 10 to 15 us however little it computes,
because the product has just filled the caches with its weights. Here each is one kernel, which
reads its input once.

The rules for all kernels of a CPU:
- A kernel changes only the memory that its docstring names. It takes the addresses of contiguous
  tensors, because making a Numba array from a tensor takes longer than many kernels run.
- Arithmetic is in float32. Results are rounded where PyTorch rounds, except in the rotary
  embedding, where PyTorch also rounds each product.
- The items of a kernel (parallel.py) are rows unless its docstring says otherwise.

Shapes: T tokens, P groups of M queries, H = K * G query heads that share K KV heads in groups of G,
D head size, B slots per block, E hidden size, F intermediate size, R rows of logits, V vocabulary.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu.jit import Kernel, compiled
from nanovllm.backends.cpu.kernels.parallel import run
from nanovllm.backends.cpu.kernels.primitives import (
    DTYPE_EXAMPLE,
    array,
    cached,
    exp,
    f32,
    from_float32,
    to_float32,
)
from nanovllm.backends.cpu.kernels.words import is_tiled, key_place, per_word, value_place


@compiled()
def add_rms_norm_rows(x_ptr, residual_ptr, weight_ptr, rows, size, eps, example, weight_example,
                      start, stop):
    """Compute residual += x; x = RMSNorm(residual) * weight. x, residual [rows, size].

    If residual_ptr is 0, x = RMSNorm(x) * weight.
    """
    added = f32(residual_ptr != 0)
    x = array(x_ptr, (rows, size), example)
    residual = array(residual_ptr if residual_ptr != 0 else x_ptr, (rows, size), example)
    weight = array(weight_ptr, (size,), weight_example)
    for i in range(start, stop):
        squares = f32(0)
        for c in range(size):
            addend = added * to_float32(residual[i, c])
            total = from_float32(to_float32(x[i, c]) + addend, example)
            residual[i, c] = total
            squares += to_float32(total) * to_float32(total)
        scale = f32(1) / np.sqrt(squares / f32(size) + f32(eps))
        for c in range(size):
            normed = from_float32(to_float32(residual[i, c]) * scale, weight_example)
            x[i, c] = from_float32(to_float32(normed) * to_float32(weight[c]), example)


@compiled()
def silu_and_mul_rows(x_ptr, out_ptr, rows, size, example, start, stop):
    """Compute out [rows, size] = silu(gate) * up, where x [rows, 2, size] is (gate, up)."""
    x = array(x_ptr, (rows, 2, size), example)
    out = array(out_ptr, (rows, size), example)
    for i in range(start, stop):
        for c in range(size):
            gate = to_float32(x[i, 0, c])
            activated = from_float32(gate / (f32(1) + exp(-gate)), example)
            out[i, c] = from_float32(to_float32(activated) * to_float32(x[i, 1, c]), example)


@compiled()
def gelu_and_mul_rows(x_ptr, out_ptr, rows, size, example, start, stop):
    """Compute out [rows, size] = gelu(gate) * up, where x [rows, 2, size] is (gate, up).

    gelu(x) = x (0.5 + 0.5 tanh(y / 2)) = x sigmoid(y). A kernel for both functions would take 1.05
    times as long as this one.
    """
    x = array(x_ptr, (rows, 2, size), example)
    out = array(out_ptr, (rows, size), example)
    for i in range(start, stop):
        for c in range(size):
            gate = to_float32(x[i, 0, c])
            y = gate * (f32(1.5957691216) + f32(0.0713548163) * gate * gate)
            activated = from_float32(gate / (f32(1) + exp(-y)), example)
            out[i, c] = from_float32(to_float32(activated) * to_float32(x[i, 1, c]), example)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor,
                 eps: float) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm(x + residual) * weight, x + residual), in place. x, residual [T, E]."""
    if residual is None:
        residual = torch.zeros_like(x)
    rows, size = x.shape
    addresses = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
    examples = DTYPE_EXAMPLE[x.dtype], DTYPE_EXAMPLE[weight.dtype]
    arguments = (*addresses, rows, size, eps, *examples)
    run(add_rms_norm_rows, arguments, rows, rows * size)
    return x, residual


def silu_and_mul(x: Tensor, kernel: Kernel = silu_and_mul_rows) -> Tensor:
    """Return silu(gate) * up [T, F] of x [T, 2F], which is (gate, up) side by side."""
    rows = len(x)
    size = x.shape[1] // 2
    out = x.new_empty(rows, size)
    arguments = (x.data_ptr(), out.data_ptr(), rows, size, DTYPE_EXAMPLE[x.dtype])
    run(kernel, arguments, rows, rows * size)
    return out


gelu_and_mul = partial(silu_and_mul, kernel=gelu_and_mul_rows)


@compiled()
def gate_rows(x_ptr, gate_ptr, rows, size, stride, example, start, stop):
    """Compute x *= sigmoid(gate), both [rows, size]. Rows of gate are `stride` numbers apart."""
    x = array(x_ptr, (rows, size), example)
    gate = array(gate_ptr, (rows, stride), example)
    for i in range(start, stop):
        for c in range(size):
            sigmoid = from_float32(f32(1) / (f32(1) + exp(-to_float32(gate[i, c]))), example)
            x[i, c] = from_float32(to_float32(x[i, c]) * to_float32(sigmoid), example)


def multiply_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate) in place. x is [T, n] and gate is [T, n] or [T, 1]."""
    rows, size = x.shape
    gate = gate if gate.shape == x.shape else gate.expand_as(x).contiguous()
    arguments = x.data_ptr(), gate.data_ptr(), rows, size, gate.stride(0), DTYPE_EXAMPLE[x.dtype]
    run(gate_rows, arguments, rows, rows * size)
    return x


@compiled()
def small_linear_rows(x_ptr, weight_ptr, out_ptr, rows, inputs, outputs, example, start, stop):
    """Compute out [rows, outputs] = x [rows, inputs] times a plain weight [outputs, inputs]."""
    x = array(x_ptr, (rows, inputs), example)
    weight = array(weight_ptr, (outputs, inputs), example)
    out = array(out_ptr, (rows, outputs), example)
    for i in range(start, stop):
        for o in range(outputs):
            total = f32(0)
            for c in range(inputs):
                total += to_float32(x[i, c]) * to_float32(weight[o, c])
            out[i, o] = from_float32(total, example)


def small_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [T, I] times a plain weight [O, I]: [T, O]. Each number is one loop over inputs."""
    x = x.contiguous()
    rows, inputs = x.shape
    outputs = len(weight)
    out = x.new_empty(rows, outputs)
    addresses = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    arguments = *addresses, rows, inputs, outputs, DTYPE_EXAMPLE[x.dtype]
    run(small_linear_rows, arguments, rows, rows * inputs * outputs)
    return out


@compiled()
def norm_rope_store_rows(qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr,
                         slot_mapping, num_blocks, num_kv_heads, block_size, dim, num_heads,
                         row_heads, eps, example, weight_example, cache_example, k_scale, v_scale,
                         start, stop):
    """Normalize and rotate q and k of qkv in place, and store k and v in the cache.

    qkv [T, row_heads, D] has H heads of q, K of k, K of v, and maybe more.

    q_norm, k_norm [D], or 0 without a norm; cos, sin [T, D] of RotaryEmbedding; slot_mapping [T];
    k and v [num_blocks, K, B, D] are caches. The scales are 1 unless the caches are in fp8. With
    fp8, q is multiplied by the scale of k, which attention then does not need. words.py has the
    layout of the caches.
    """
    shape = num_blocks, num_kv_heads, block_size, dim
    half = dim // 2
    tokens = len(slot_mapping)
    qkv = array(qkv_ptr, (tokens, row_heads, dim), example)
    cos, sin = array(cos_ptr, (tokens, dim), example), array(sin_ptr, (tokens, dim), example)
    k_cache, v_cache = array(k_ptr, shape, cache_example), array(v_ptr, shape, cache_example)
    row = np.empty(dim, f32)
    n = per_word(cache_example)
    tiled = is_tiled(block_size, dim)
    for i in range(start, stop):
        block, offset = slot_mapping[i] // block_size, slot_mapping[i] % block_size
        for h in range(num_heads + num_kv_heads):
            x = qkv[i, h]
            for c in range(dim):
                row[c] = to_float32(x[c])
            weight_ptr = q_norm_ptr if h < num_heads else k_norm_ptr
            if weight_ptr != 0:
                weight = array(weight_ptr, (dim,), weight_example)
                squares = f32(0)
                for c in range(dim):
                    squares += row[c] * row[c]
                scale = f32(1) / np.sqrt(squares / f32(dim) + f32(eps))
                for c in range(dim):
                    normed = to_float32(from_float32(row[c] * scale, weight_example))
                    row[c] = to_float32(from_float32(normed * to_float32(weight[c]), example))
            if h < num_heads and k_scale != 1:
                for c in range(dim):
                    row[c] *= f32(k_scale)
            for c in range(half):
                a = row[c]
                b = row[c + half]
                d = c + half
                x[c] = from_float32(a * to_float32(cos[i, c]) + b * to_float32(sin[i, c]), example)
                x[d] = from_float32(b * to_float32(cos[i, d]) + a * to_float32(sin[i, d]), example)
            if h >= num_heads:
                head = h - num_heads
                v = qkv[i, h + num_kv_heads]
                k_block, v_block = k_cache[block, head].ravel(), v_cache[block, head].ravel()
                for c in range(dim):
                    place = key_place(offset, c, dim, tiled, n)
                    k_block[place] = cached(x[c], f32(k_scale), cache_example)
                for c in range(dim):
                    place = value_place(offset, c, dim, tiled, n)
                    v_block[place] = cached(v[c], f32(v_scale), cache_example)
