"""A mixture of experts on a CPU in one call: `expert_mlp` of features/models/moe/experts.py.

Between two calls from Python the memory is idle. With one sequence and 64 experts of 1024 x 384
weights the calls of torch that sorted, gathered and added rows took 3 of the 56 ms of a step.

Few rows of a step belong to the same expert, so a product takes as long as reading the weights of
the experts that have rows. One parallel loop computes all of them, because a loop for each expert
would wait for its threads each time. Its items are blocks of outputs of these experts, which the
kernels of other products compute.
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
from nanovllm.backends.cpu.kernels.parallel import address_for, call_at, in_parts
from nanovllm.backends.cpu.kernels.primitives import (
    DTYPE_EXAMPLE,
    array,
    bytes_of,
    f32,
    from_float32,
    to_float32,
)
from nanovllm.backends.cpu.kernels.product import Product, pointers, prepared, row_bytes
from nanovllm.models.layers import Linear

# Rows of an expert that are computed together, while a block of weights stays in the caches.
ROWS = 64


class ExpertWeights(NamedTuple):
    """The weights of all experts; addresses and sizes."""

    product: Product
    weight_ptr: int
    scale_ptr: int
    inputs: int
    outputs: int  # of an expert
    weight_bytes: int  # of an expert
    scale_bytes: int


@compiled()
def expert_blocks(kernel, x_ptr, weight_ptr, scale_ptr, out_ptr, hits, ends, inputs, outputs, width,
                  x_bytes, weight_bytes, scale_bytes, out_bytes, example, start, stop):
    """Compute blocks of out [N, outputs] from rows x of `x_bytes`, sorted by expert.

    `kernel` is the address of a kernel of blocks. Block b of expert hits[h] is item
    h * ceil(outputs / width) + b. The weights of an expert take `weight_bytes`, its scales
    `scale_bytes`.
    """
    blocks = (outputs + width - 1) // width
    for hit in range(start // blocks, (stop + blocks - 1) // blocks):
        expert = hits[hit]
        part = max(start - hit * blocks, 0), min(stop - hit * blocks, blocks)
        for first in range(ends[expert - 1] if expert > 0 else 0, ends[expert], ROWS):
            arguments = (x_ptr + x_bytes * first, weight_ptr + weight_bytes * expert,
                         scale_ptr + scale_bytes * expert, np.int64(0), out_ptr + out_bytes * first,
                         min(ROWS, ends[expert] - first), inputs, outputs, example)
            call_at(kernel, (*arguments, *part))


@compiled()
def multiply_experts(weights, kernel, x_ptr, out_ptr, work_ptr, hits, ends, example, parts):
    """Multiply the sorted rows x [N, inputs] by the weights of their experts.

    `kernel` is the address of expert_blocks, and `work` has prepared rows.
    """
    product = weights.product
    inputs = weights.inputs
    outputs = weights.outputs
    width = product.width
    x_ptr = prepared(product, x_ptr, ends[-1], inputs, work_ptr, example, parts)
    arguments = (product.kernel, x_ptr, weights.weight_ptr, weights.scale_ptr, out_ptr, hits, ends,
                 inputs, outputs, width, row_bytes(product, inputs), weights.weight_bytes,
                 weights.scale_bytes, bytes_of(example) * outputs, example)
    in_parts(kernel, arguments, len(hits) * ((outputs + width - 1) // width), parts)


def described(module: Linear, num_experts: int) -> ExpertWeights:
    """Return the weights of a Linear as arguments of `multiply_experts`."""
    weight = module.weight
    outputs, inputs = weight.shape[0] // num_experts, weight.shape[1]
    values, scale, _bias = pointers(module)
    return ExpertWeights(
        product=weight.product,
        weight_ptr=values,
        scale_ptr=scale,
        inputs=inputs,
        outputs=outputs,
        weight_bytes=weight.values.nbytes // num_experts,
        scale_bytes=weight.scale.nbytes // num_experts,
    )


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
    out = array(out_ptr, (len(places), size), example)
    total = np.empty(size, f32)
    for t in range(start, stop):
        total[:] = 0
        for k in range(places.shape[1]):
            weight, row = to_float32(weights[t, k]), rows[places[t, k]]
            for c in range(size):
                total[c] += weight * to_float32(row[c])
        for c in range(size):
            out[t, c] = from_float32(total[c], example)


@compiled()
def mlp(gate_up, down, kernels, x_ptr, weight_ptr, choices, buffers, out_ptr, num_experts, example,
        parts):
    """Compute out [T, E] as features/models/moe/experts.py does.

    `kernels` are of addresses_for. `buffers` are the addresses of scratch memory [N, E], [N, 2F]
    and [N, F] in the dtype of x, and of memory for N prepared rows.
    """
    size = gate_up.inputs
    num_rows = choices.size
    flat = choices.ravel()
    counts = np.zeros(num_experts, np.int64)
    for choice in flat:
        counts[choice] += 1
    hits = np.flatnonzero(counts)
    ends = np.cumsum(counts)
    next_row = ends - counts
    tokens = np.empty(num_rows, np.int64)
    places = np.empty(num_rows, np.int64)
    for i in range(num_rows):
        places[i] = next_row[flat[i]]
        next_row[flat[i]] += 1
        tokens[places[i]] = i // choices.shape[1]
    rows_ptr, both_ptr, activated_ptr, work_ptr = buffers
    multiply, gather, activate, add = kernels
    in_parts(gather, (x_ptr, tokens, rows_ptr, size, example), num_rows, parts)
    multiply_experts(gate_up, multiply, rows_ptr, both_ptr, work_ptr, hits, ends, example, parts)
    arguments = both_ptr, activated_ptr, num_rows, down.inputs, example
    in_parts(activate, arguments, num_rows, parts)
    multiply_experts(down, multiply, activated_ptr, rows_ptr, work_ptr, hits, ends, example, parts)
    arguments = rows_ptr, weight_ptr, places.reshape(choices.shape), out_ptr, size, example
    in_parts(add, arguments, len(choices), parts)


@cache
def addresses_for(dtype: torch.dtype) -> tuple[int, ...]:
    """Return the addresses of the kernels in the dtype of a model."""
    kernels = expert_blocks, gather_rows, pointwise.silu_and_mul_rows, sum_rows
    return tuple(address_for(kernel, dtype, dtype) for kernel in kernels)


def expert_mlp(
    x: Tensor, weights: Tensor, choices: Tensor, gate_up: Linear, down: Linear
) -> Tensor:
    """Return for each token of x [T, E] the sum of the results of its experts [T, E].

    `weights` and `choices` [T, k] are the factors and the numbers of the experts.
    """
    num_experts = down.weight.shape[0] // x.shape[1]
    out = torch.empty_like(x)
    both, activated = (described(m, num_experts) for m in (gate_up, down))
    sizes = both.inputs, both.outputs, activated.inputs
    buffers = [x.new_empty(choices.numel(), size) for size in sizes]
    row_bytes = max(w.product.work_bytes(w.inputs) for w in (both, activated))
    buffers.append(x.new_empty(choices.numel() * row_bytes, dtype=torch.uint8))
    x, weights = x.contiguous(), weights.contiguous()
    mlp(both, activated, addresses_for(x.dtype), x.data_ptr(), weights.data_ptr(), choices.numpy(),
        tuple(buffer.data_ptr() for buffer in buffers), out.data_ptr(), num_experts,
        DTYPE_EXAMPLE[x.dtype], get_num_threads())
    return out
