"""Computes a whole step in one call: from the rows of the runner to the sampled tokens.

After a step has read the weights, the caches have nothing else: each of about forty operations of
torch and NumPy then takes 10 to 40 us, together 1.3 ms of a step of 9 ms. They
remain for steps with rules, with prompts or with a prefix that is worth reading once for several
sequences.
"""

from typing import NamedTuple

import numpy as np

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.fused_decode import compute_layers, norm
from nanovllm.backends.cpu.kernels.int8 import OUTPUTS
from nanovllm.backends.cpu.kernels.parallel import call_at, in_parts
from nanovllm.backends.cpu.kernels.primitives import array, f32, from_float32
from nanovllm.backends.cpu.kernels.product import Product, padded_inputs, prepared
from nanovllm.backends.cpu.kernels.sampler import GROUP, load_maxima, most_likely


class Host(NamedTuple):
    """The arrays of runner/rows.py, and the tables that are read by token and by position."""

    positions: np.ndarray  # [N + 1] int64
    block_tables: np.ndarray  # [N + 1, B] int32
    last_tokens: np.ndarray  # [N + 1] int64
    params: np.ndarray  # [1 + filters, N + 1] float32
    seeds: np.ndarray  # [N + 1] int64
    embeddings: int  # the address of [V, E], or of the `values` of an int8.PackedWeight
    scale: int  # the address of its `scale`, or 0
    rotary: int  # the address of [2, max_len, D]
    max_len: int
    min_shared: int  # a prefix of so many tokens or more is read once for several sequences


def example_host() -> Host:
    """Return a Host with the types of every Host."""
    numbers, tables = np.empty(0, np.int64), np.empty((0, 0), np.int32)
    return Host(
        positions=numbers,
        block_tables=tables,
        last_tokens=numbers,
        params=tables.astype(np.float32),
        seeds=numbers,
        embeddings=0,
        scale=0,
        rotary=0,
        max_len=0,
        min_shared=0,
    )


class Head(NamedTuple):
    """The last norm, the head and the sampler. All but the product are addresses or sizes."""

    product: Product  # of the head, which may differ from that of the layers
    weight: int
    scale: int
    bias: int
    norm: int
    logits: int  # [rows, V]
    group_blocks: int  # of `group_blocks`
    draw: int  # of sampler.draw_rows
    size: int  # V
    is_bf16: bool


@compiled()
def group_blocks(blocks, width, x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, size,
                 maxima_ptr, is_bf16, example, start, stop):
    """Compute groups of GROUP logits of out [rows, V], and the maxima [rows, groups] of them.

    `blocks` is the address of a kernel of blocks, each with `width` outputs.
    """
    arguments = (x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows, inputs, size, example)
    maxima = array(maxima_ptr, (rows, (size + GROUP - 1) // GROUP), f32(0))
    for group in range(start, stop):
        last = (min((group + 1) * GROUP, size) + width - 1) // width
        call_at(blocks, (*arguments, np.int64(group * GROUP // width), np.int64(last)))
        for row in range(rows):
            load_maxima(out_ptr, is_bf16, row * size, size, maxima[row], group, group + 1)


@compiled()
def embed(host, token, x, example):
    """Set x [E] to the embedding of a token."""
    size = len(x)
    if host.scale == 0:
        row = array(host.embeddings, (token + 1, size), example)[token]
        for c in range(size):  # the error message of `x[:] = row` would take seconds to compile
            x[c] = row[c]
        return
    block, output, columns = token // OUTPUTS, token % OUTPUTS, padded_inputs(size) // 4
    values = array(host.embeddings, (block + 1, columns, OUTPUTS, 4), np.uint8(0))[block]
    scale = array(host.scale, (token + 1,), f32(0))[token]
    for c in range(size):
        value = f32(np.int32(values[c // 4, output, c % 4]) - np.int32(128))
        x[c] = from_float32(value * scale, example)


@compiled()
def look_up(host, step, rows, places, positions, tokens):
    """Set the inputs of the layers: x, residual, cos, sin, and the work of attention.

    places [P] are the places of the groups of queries in the work.
    """
    (_, _, block_size, dim), example, rest = step.shape, step.example, step.attention.rest
    x = array(step.x, (step.rows, step.size), example)
    residual = array(step.residual, (step.rows, step.size), example)
    cos = array(step.cos, (step.rows, dim), example)
    sin = array(step.sin, (step.rows, dim), example)
    rotary = array(host.rotary, (2, host.max_len, dim), example)
    residual[:] = 0
    rest.queries[:] = -1
    group, place, query = 0, np.int64(0), 0
    for t in range(step.rows):
        row, position = rows[t], positions[t]
        embed(host, tokens[t], x[t], example)
        for c in range(dim):
            cos[t, c], sin[t, c] = rotary[0, position, c], rotary[1, position, c]
        block = np.int64(host.block_tables[row, position // block_size])
        step.slot_mapping[t] = block * block_size + position % block_size
        if t == 0 or row != rows[t - 1] or query == rest.queries.shape[1]:
            place, group, query = places[group], group + 1, 0
            for b in range((host.positions[row] - 1) // block_size + 1):
                rest.block_tables[place, b] = host.block_tables[row, b]
        rest.queries[place, query], rest.context_lens[place, query] = t, position + 1
        query += 1


@compiled()
def shares_prefix(host, rows, block_size):
    """Return whether rows share a prefix that is worth reading at once; see NumbaAttention."""
    for i in range(len(rows)):
        table, others = host.block_tables[rows[i]], 0
        shared = (host.positions[rows[i]] - 1) // block_size
        if shared * block_size * (len(rows) - 1) < host.min_shared:
            continue
        for j in range(i + 1, len(rows)):
            other = host.block_tables[rows[j]]
            if rows[j] == rows[j - 1] or rows[j] == rows[i] or table[0] != other[0]:
                continue
            blocks = min(shared, (host.positions[rows[j]] - 1) // block_size)
            shared, others = 0, others + 1
            while shared < blocks and table[shared] == other[shared]:
                shared += 1
        if shared * block_size * others >= host.min_shared:
            return True
    return False


@compiled()
def sample_tokens(code, step, addresses, scales, states, host, head, rows, places, tokens):
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
    compute_layers(code, step, addresses, scales, states)
    norm(code, step, head.norm)
    example, size, count = step.example, head.size, step.rows
    groups, product = (size + GROUP - 1) // GROUP, head.product
    maxima = np.empty((count, groups), f32)
    x = prepared(product, step.x, count, step.size, step.work, example, step.parts)
    arguments = (product.blocks, product.width, x, head.weight, head.scale, head.bias, head.logits,
                 count, step.size, size, np.int64(maxima.ctypes.data), head.is_bf16, example)
    in_parts(head.group_blocks, arguments, groups, step.parts)
    temperatures = host.params[0][rows]
    if np.any(temperatures > 0):
        filters = np.empty((len(host.params) - 1, count), f32)
        for i in range(len(filters)):
            for r in range(count):
                filters[i, r] = host.params[1 + i, rows[r]]
        sampled = (head.logits, head.is_bf16, size, temperatures, host.seeds[rows], positions + 1,
                   filters, tokens)
        in_parts(head.draw, sampled, count, min(count, step.parts))
    else:
        for i in range(count):
            tokens[i] = most_likely(head.logits, head.is_bf16, i * size, size, maxima[i])
    for i in range(count):
        host.last_tokens[rows[i]] = max(tokens[i], 0)
    return True
