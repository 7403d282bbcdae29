"""A mixture of experts on a CPU in one call: `expert_mlp` of features/models/moe/experts.py.

Between two calls from Python the memory is idle. With one sequence and 64 experts of 1024 x 384
weights the calls of torch that sorted, gathered and added rows took 3 of the 56 ms of a step.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numba import get_num_threads
from torch import Tensor

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels import pointwise
from nanovllm.backends.cpu.kernels.experts import described, expert_blocks, product
from nanovllm.backends.cpu.kernels.parallel import address_for, in_parts
from nanovllm.backends.cpu.kernels.primitives import (
    DTYPE_EXAMPLE,
    array,
    f32,
    from_float32,
    to_float32,
)
from nanovllm.models.layers import Linear


@compiled()
def gather_rows(x_ptr, tokens, out_ptr, size, example, start, stop):
    """Copy rows [start, stop) of out [N, size] from the rows `tokens` [N] of x."""
    out = array(out_ptr, (len(tokens), size), example)
    x = array(x_ptr, (len(tokens), size), example)  # of T <= N rows
    for i in range(start, stop):
        out[i] = x[tokens[i]]


@compiled()
def sum_rows(rows_ptr, weight_ptr, places, out_ptr, size, example, start, stop):
    """Compute out [T, size] = the sum of weights [T, k] times the rows `places` [T, k]."""
    rows = array(rows_ptr, (places.size, size), example)
    weights = array(weight_ptr, places.shape, example)
    out, total = array(out_ptr, (len(places), size), example), np.empty(size, f32)
    for t in range(start, stop):
        total[:] = 0
        for k in range(places.shape[1]):
            weight, row = to_float32(weights[t, k]), rows[places[t, k]]
            for c in range(size):
                total[c] += weight * to_float32(row[c])
        for c in range(size):
            out[t, c] = from_float32(total[c], example)


class Code(NamedTuple):
    """The addresses of the kernels of a mixture."""

    experts: int  # expert_blocks
    gather: int
    activation: int
    add: int


@compiled()
def mlp(gate_up, down, code, x_ptr, weight_ptr, choices, buffers, out_ptr, num_experts, itemsize,
        example, parts):
    """Compute out [T, E] as features/models/moe/experts.py does.

    `buffers` are the addresses of scratch memory [N, E], [N, 2F] and [N, F] in the dtype of x, and
    of memory for N quantized rows.
    """
    size, num_rows = gate_up.inputs, choices.size
    ends, next_row = np.zeros(num_experts, np.int64), np.zeros(num_experts, np.int64)
    for choice in choices.flat:
        ends[choice] += 1
    hits = np.flatnonzero(ends)
    for expert in range(1, num_experts):
        ends[expert] += ends[expert - 1]
        next_row[expert] = ends[expert - 1]
    tokens, places = np.empty(num_rows, np.int64), np.empty(choices.shape, np.int64)
    for t in range(len(choices)):
        for k in range(choices.shape[1]):
            row = next_row[choices[t, k]]
            next_row[choices[t, k]] += 1
            places[t, k], tokens[row] = row, t
    rows_ptr, both_ptr, activated_ptr, work_ptr = buffers
    in_parts(code.gather, (x_ptr, tokens, rows_ptr, size, example), num_rows, parts)
    product(gate_up, code.experts, rows_ptr, both_ptr, work_ptr, hits, ends, itemsize, example,
            parts)
    activation = both_ptr, activated_ptr, num_rows, down.inputs, example
    in_parts(code.activation, activation, num_rows, parts)
    product(down, code.experts, activated_ptr, rows_ptr, work_ptr, hits, ends, itemsize, example,
            parts)
    in_parts(code.add, (rows_ptr, weight_ptr, places, out_ptr, size, example), len(choices), parts)


@cache
def code_for(dtype: torch.dtype) -> Code:
    """Return the kernels in the dtype of a model."""
    kernels = expert_blocks, gather_rows, pointwise.silu_and_mul_rows, sum_rows
    return Code(*(address_for(kernel, dtype, dtype) for kernel in kernels))


def expert_mlp(
    x: Tensor, weights: Tensor, choices: Tensor, gate_up: Linear, down: Linear
) -> Tensor:
    """Return for each token of x [T, E] the sum of the results of its experts [T, E].

    `weights` and `choices` [T, k] are the factors and the numbers of the experts.
    """
    num_experts, out = down.weight.shape[0] // x.shape[1], torch.empty_like(x)
    both, activated = (described(m, num_experts, x.dtype) for m in (gate_up, down))
    sizes = both.inputs, both.outputs, activated.inputs
    buffers = [x.new_empty(choices.numel(), size) for size in sizes]
    row_bytes = max(w.code.row_bytes(w.inputs) for w in (both, activated))
    buffers.append(x.new_empty(choices.numel() * row_bytes, dtype=torch.uint8))
    x, weights = x.contiguous(), weights.contiguous()
    mlp(both, activated, code_for(x.dtype), x.data_ptr(), weights.data_ptr(), choices.numpy(),
        tuple(buffer.data_ptr() for buffer in buffers), out.data_ptr(), num_experts, x.itemsize,
        DTYPE_EXAMPLE[x.dtype], get_num_threads())
    return out
