"""Computes a whole step in one call: from the rows of the runner to the sampled tokens.

Otherwise about forty operations of torch and NumPy prepare and finish a step, which takes longer
than the layers of a small model. They remain for steps with rules, with prompts or with a prefix
that is worth reading once for several sequences.
"""

from typing import NamedTuple

import numpy as np

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.fused_layers import compute_layers, norm
from nanovllm.backends.cpu.kernels.parallel import in_parts
from nanovllm.backends.cpu.kernels.primitives import array, bytes_of, f32, from_float32, to_float32
from nanovllm.backends.cpu.kernels.product import Product, compute, padded_bytes, padded_inputs


class Host(NamedTuple):
    """The arrays of runner/rows.py, and the tables that are read by token and by position."""

    positions: np.ndarray  # [N + 1] int64
    block_tables: np.ndarray  # [N + 1, B] int32
    last_tokens: np.ndarray  # [N + 1] int64
    params: np.ndarray  # [1 + filters, N + 1] float32
    seeds: np.ndarray  # [N + 1] int64
    embeddings: int  # the address of [V, E], or of the `values` of a PackedWeight
    scale: int  # the address of its `scale` in int8, or 0
    table_width: int  # outputs of its blocks, or 1
    factor: float  # multiplies the embeddings
    rotary: int  # the address of [2, ropes, max_len, D]
    ropes: int
    max_len: int
    min_shared: int  # a prefix of so many tokens or more is read once for several sequences


class OutputLayer(NamedTuple):
    """The last norm, the head and the sampler. All but the product are addresses or sizes."""

    product: Product  # it may differ from that of the layers
    weight: int
    scale: int
    bias: int
    norm: int
    logits: int  # [rows, V]
    draw: int  # of sampler.draw_rows
    size: int  # V
    is_bf16: bool


@compiled()
def embed(host, token, x, example):
    """Set x [E] to the embedding of a token."""
    size = len(x)
    width = host.table_width
    block, output = token // width, token % width
    if width == 1:
        row = array(host.embeddings, (token + 1, size), example)[token]
        for c in range(size):  # the error message of `x[:] = row` would take seconds to compile
            x[c] = row[c]
    elif host.scale == 0:
        n = 4 // bytes_of(example)  # numbers of a word
        words = padded_bytes(size, bytes_of(example)) // 4
        values = array(host.embeddings, (block + 1, words, width, n), example)[block]
        for c in range(size):
            x[c] = values[c // n, output, c % n]
    else:
        words = padded_inputs(size) // 4
        unsigned = array(host.embeddings, (block + 1, words, width, 4), np.uint8(0))[block]
        scale = array(host.scale, (token + 1,), f32(0))[token]
        for c in range(size):
            value = f32(np.int32(unsigned[c // 4, output, c % 4]) - np.int32(128))
            x[c] = from_float32(value * scale, example)
    if host.factor != 1:
        for c in range(size):
            x[c] = from_float32(to_float32(x[c]) * f32(host.factor), example)


@compiled()
def look_up(host, step, rows, places, positions, tokens):
    """Set the inputs of the layers: x, residual, cos, sin, and the work of attention.

    places [P] are the places of the groups of queries in the work.
    """
    _, _, block_size, dim = step.shape
    example = step.example
    rest = step.attention.rest
    x = array(step.x, (step.rows, step.size), example)
    residual = array(step.residual, (step.rows, step.size), example)
    cos = array(step.cos, (host.ropes, step.rows, dim), example)
    sin = array(step.sin, (host.ropes, step.rows, dim), example)
    rotary = array(host.rotary, (2, host.ropes, host.max_len, dim), example)
    residual[:] = 0
    rest.queries[:] = -1
    group, place, query = 0, np.int64(0), 0
    for t in range(step.rows):
        row = rows[t]
        position = positions[t]
        embed(host, tokens[t], x[t], example)
        for rope in range(host.ropes):
            for c in range(dim):
                cos[rope, t, c] = rotary[0, rope, position, c]
                sin[rope, t, c] = rotary[1, rope, position, c]
        step.attention.positions[t] = position
        block = np.int64(host.block_tables[row, position // block_size])
        step.attention.slot_mapping[t] = block * block_size + position % block_size
        if t == 0 or row != rows[t - 1] or query == rest.queries.shape[1]:
            place, group, query = places[group], group + 1, 0
            for b in range((host.positions[row] - 1) // block_size + 1):
                rest.block_tables[place, b] = host.block_tables[row, b]
        rest.queries[place, query] = t
        rest.context_lens[place, query] = position + 1
        query += 1


@compiled()
def shares_prefix(host, rows, block_size):
    """Return whether rows share a prefix that is worth reading at once; see NumbaAttention."""
    for i in range(len(rows)):
        table = host.block_tables[rows[i]]
        others = 0
        shared = (host.positions[rows[i]] - 1) // block_size
        if shared * block_size * (len(rows) - 1) < host.min_shared:
            continue
        for j in range(i + 1, len(rows)):
            other = host.block_tables[rows[j]]
            if rows[j] == rows[j - 1] or rows[j] == rows[i] or table[0] != other[0]:
                continue
            blocks = min(shared, (host.positions[rows[j]] - 1) // block_size)
            shared = 0
            others += 1
            while shared < blocks and table[shared] == other[shared]:
                shared += 1
        if shared * block_size * others >= host.min_shared:
            return True
    return False


@compiled()
def sample_tokens(kernels, step, layers, states, host, head, rows, places, tokens):
    """Replace each of `tokens` [T], inputs of rows [T], by the token that is sampled after it.

    The tokens of a row are consecutive and its last ones. Without a token that can be sampled, the
    result is -1. The last token of a row is stored in host.last_tokens.

    Returns False, and computes nothing, if rows share a prefix that is worth reading at once.
    """
    if shares_prefix(host, rows, step.shape[2]):
        return False
    positions = host.positions[rows] - 1
    for t in range(len(rows) - 2, -1, -1):
        if rows[t] == rows[t + 1]:
            positions[t] = positions[t + 1] - 1
    look_up(host, step, rows, places, positions, tokens)
    compute_layers(kernels, step, layers, states)
    norm(kernels, step, head.norm, step.residual)
    compute(head.product, step.x, head.weight, head.scale, head.bias, head.logits, step.rows,
            step.size, head.size, step.work, step.example, step.parts)
    params = np.empty((len(host.params), step.rows), f32)
    for t in range(step.rows):
        params[:, t] = host.params[:, rows[t]]
    arguments = (head.logits, head.is_bf16, head.size, params[0], host.seeds[rows], positions + 1,
                 params[1:], tokens)
    in_parts(head.draw, arguments, step.rows, min(step.rows, step.parts))
    for t in range(step.rows):
        host.last_tokens[rows[t]] = max(tokens[t], 0)
    return True
