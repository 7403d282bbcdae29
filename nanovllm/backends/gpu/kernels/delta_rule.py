"""The gated delta rule: `decode` and `chunk`. Reference: features/models/hybrid/delta_rule.py.

`decode` takes two launches: `_convolve_decode` and `_decode_rule`. Their grids depend only on the
number of sequences, so that a CUDA graph can capture them.

`chunk` computes CHUNK tokens at a time, as in arXiv:2406.06484. For one chunk and head, with the
cumulative decay a_i, the matrix of decays D_ij = e^(a_i - a_j) for j <= i, and the state S:

    A = (I + strictly_lower(beta K K^T * D))^-1 diag(beta)     _solve, for all chunks at once
    P = Q K^T * D                                              _solve
    d = A (V - e^a K S)                                        _chunk_rule, chunk after chunk
    o = e^a Q S + P d                                          _chunk_rule
    S <- e^(a_last) S + (e^(a_last - a) K)^T d                 _chunk_rule

`_convolve` comes first, and also updates the state of the convolution. `_gated_norm` comes last.
The products take q and k as they are, so that TF32 does not round them; factors of the results give
them unit length.

Two tables in int64 tell a program of `chunk` what to compute. A row of `segments` is one sequence:
(row of the state, first token, end, 0 if it begins with a state of zeros and else 1, its first
tile). A row of `tiles` is CHUNK tokens of one sequence: the same first four numbers, and the tile's
first token. A sequence without tokens has one tile.

C, HK, HV, DK and DV are the sizes of the reference, and W is the number of columns of x: C channels
of q, k and v, then z [HV DV], b [HV] and a [HV]. Products of float32 are in TF32 if the model is in
half precision, and exact if it is in float32.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.gpu.kernels.launch import launch
from nanovllm.models.transfers import to_device

CHUNK = tl.constexpr(64)
# One program takes this many channels of the convolution, of one token or of a tile.
CHANNELS = tl.constexpr(512)
TILE_CHANNELS = tl.constexpr(64)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _inverse_length(x):
    """1 / the length of x [..., D], in float32."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, len(x.shape) - 1) + 1e-6)


@triton.jit
def _gates(gates, head, a_log, dt_bias, mask, HV: tl.constexpr):
    """beta and g, from pointers to b of the head 0; both are 0 where `mask` is false."""
    b = tl.load(gates + head, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(gates + HV + head, mask=mask, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(a)))
    g = -tl.exp(tl.load(a_log + head)) * softplus
    return tl.where(mask, 1.0 / (1.0 + tl.exp(-b)), 0.0), tl.where(mask, g, 0.0)


@triton.jit
def _norm_and_gate(o, z, weight, eps, DV: tl.constexpr):
    """RMSNorm(o) * silu(z) of o and z [..., DV] in float32; o is 0 in columns from DV."""
    inverse_rms = tl.rsqrt(tl.sum(o * o, len(o.shape) - 1, keep_dims=True) / DV + eps)
    return o * inverse_rms * weight * _silu(z)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _convolve_decode(x, conv_weight, conv, rows, qkv, C: tl.constexpr, W: tl.constexpr):
    """One program computes CHANNELS channels of one sequence, and shifts its last inputs."""
    seq = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < C
    inputs = conv + tl.load(rows + seq) * (3 * C) + channel
    acc = tl.zeros([CHANNELS], tl.float32)
    for tap in tl.static_range(4):
        ptrs = x + seq * W + channel if tap == 3 else inputs + tap * C
        value = tl.load(ptrs, mask=mask, other=0.0)
        acc += value.to(tl.float32) * tl.load(conv_weight + tap * C + channel, mask=mask, other=0.0)
        if tap > 0:
            tl.store(inputs + (tap - 1) * C, value, mask=mask)
    tl.store(qkv + seq * C + channel, _silu(acc).to(qkv.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _decode_rule(
    x, qkv, a_log, dt_bias, norm_weight, rule, rows, out, eps,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):
    """One program computes one head of one sequence. Its registers hold the whole state."""
    C: tl.constexpr = 2 * HK * DK + HV * DV
    W: tl.constexpr = C + HV * DV + 2 * HV
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, triton.next_power_of_2(DK))
    column = tl.arange(0, triton.next_power_of_2(DV))
    is_dim, is_column = dim < DK, column < DV
    row = tl.load(rows + seq)
    state_ptrs = rule + ((row * HV + head) * DK + dim[:, None]) * DV + column[None, :]
    mask = is_dim[:, None] & is_column[None, :]
    state = tl.load(state_ptrs, mask=mask, other=0.0)
    heads = qkv + seq * C
    q_ptrs = heads + head // (HV // HK) * DK + dim
    q = tl.load(q_ptrs, mask=is_dim, other=0.0)
    k = tl.load(q_ptrs + HK * DK, mask=is_dim, other=0.0)
    q = q.to(tl.float32) * (_inverse_length(q) * DK**-0.5)
    k = k.to(tl.float32) * _inverse_length(k)
    v_ptrs = heads + 2 * HK * DK + head * DV + column
    v = tl.load(v_ptrs, mask=is_column, other=0.0).to(tl.float32)
    gates = x + seq * W + C
    z = tl.load(gates + head * DV + column, mask=is_column, other=0.0).to(tl.float32)
    beta, g = _gates(gates + HV * DV, head, a_log, dt_bias, True, HV)
    state *= tl.exp(g)
    difference = beta * (v - tl.sum(state * k[:, None], 0))
    o = tl.sum(state * q[:, None], 0) + difference * tl.sum(k * q, 0)
    tl.store(state_ptrs, state + k[:, None] * difference[None, :], mask=mask)
    scale = tl.load(norm_weight + column, mask=is_column, other=0.0)
    o = _norm_and_gate(o, z, scale, eps, DV).to(out.dtype.element_ty)
    tl.store(out + (seq * HV + head) * DV + column, o, mask=is_column)


def decode(layer: Any, x: Tensor, conv: Tensor, rule: Tensor, rows: Tensor) -> Tensor:
    """Compute one token of each of the sequences in `rows` [S] int64; return [S, Hv Dv].

    x [S, C + Hv Dv + 2 Hv] are the projections. The states conv [N, 3, C], in the dtype of x, and
    rule [N, Hv, Dk, Dv] float32 are changed. All tensors are contiguous.
    """
    C = conv.shape[2]
    HK, HV, DK, DV = layer.sizes
    num = len(x)
    qkv, out = x.new_empty((num, C)), x.new_empty((num, HV * DV))
    args = (x, layer.conv1d, conv, rows, qkv)
    grid = (num, -(-C // CHANNELS.value), 1)
    launch(_convolve_decode, grid, args, dict(C=C, W=x.shape[1]), num_warps=4)
    rest = (x, qkv, layer.a_log, layer.dt_bias, layer.norm, rule, rows, out, layer.eps)
    launch(_decode_rule, (num, HV, 1), rest, dict(HK=HK, HV=HV, DK=DK, DV=DV), num_warps=16)
    return out


@triton.jit
def _input(x, conv, row, start, has_state, token, channel, mask, C: tl.constexpr, W: tl.constexpr):
    """Inputs of the convolution [tokens, channels]. Those before `start` are in the state."""
    old_ptrs = conv + (row * 3 + token - start + 3) * C + channel
    is_old = (token < start) & (channel < C * has_state)
    old = tl.load(old_ptrs, mask=mask & is_old, other=0.0)
    new = tl.load(x + token * W + channel, mask=mask & (token >= start), other=0.0)
    return tl.where(token < start, old, new)


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _convolve(x, conv_weight, conv, tiles, qkv, C: tl.constexpr, W: tl.constexpr):
    """One program computes TILE_CHANNELS channels of one tile.

    The programs of a sequence's first tile also write its last three inputs to the state, because
    no others read it.
    """
    tile = tiles + tl.program_id(0) * 5
    row, start, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    has_state, first = tl.load(tile + 3), tl.load(tile + 4)
    token = (first + tl.arange(0, CHUNK))[:, None]
    channel = (tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS))[None, :]
    mask = (token < end) & (channel < C)
    acc = tl.zeros([CHUNK, TILE_CHANNELS], tl.float32)
    for tap in tl.static_range(4):
        value = _input(x, conv, row, start, has_state, token + (tap - 3), channel, mask, C, W)
        scale = tl.load(conv_weight + tap * C + channel, mask=channel < C, other=0.0)
        acc += value.to(tl.float32) * scale.to(tl.float32)
    tl.store(qkv + token * C + channel, _silu(acc).to(qkv.dtype.element_ty), mask=mask)
    if first == start:
        i = tl.arange(0, 4)[:, None]
        is_last = (i < 3) & (channel < C)
        last = _input(x, conv, row, start, has_state, end - 3 + i, channel, is_last, C, W)
        tl.debug_barrier()  # all threads have read the state
        tl.store(conv + (row * 3 + i) * C + channel, last, mask=is_last)


@triton.jit
def _load_heads(ptrs, token, end, C: tl.constexpr, DK: tl.constexpr):
    """q or k of the tokens [CHUNK, DK]; 0 from `end`."""
    dim = tl.arange(0, triton.next_power_of_2(DK))
    mask = (token < end)[:, None] & (dim < DK)[None, :]
    return tl.load(ptrs + token[:, None] * C + dim[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _solve(
    x, qkv, a_log, dt_bias, tiles, factors, systems, scores,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):
    """One program computes A, P and the factors of one tile and head.

    systems and scores [tiles, HV, CHUNK, CHUNK], and factors [tiles, HV, 4, CHUNK] are float32. The
    first three factors of a token make e^a Q, e^a K and e^(a_last - a) K of its query and key. The
    fourth is the decay of the state.

    The inverse X of I + N is found by block doubling. If X has the inverses of the diagonal blocks
    of size s, and M is the part of N that joins two such blocks, then X - X M X has the inverses of
    the blocks of size 2 s. No number becomes large, as powers of N do if keys are repeated.
    """
    C: tl.constexpr = 2 * HK * DK + HV * DV
    W: tl.constexpr = C + HV * DV + 2 * HV
    PRECISION: tl.constexpr = "ieee" if qkv.dtype.element_ty == tl.float32 else "tf32"
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(tiles + tile * 5 + 2)
    i = tl.arange(0, CHUNK)
    token = tl.load(tiles + tile * 5 + 4) + i
    q_ptrs = qkv + head // (HV // HK) * DK
    q = _load_heads(q_ptrs, token, end, C, DK)
    k = _load_heads(q_ptrs + HK * DK, token, end, C, DK)
    q_scale, k_scale = _inverse_length(q) * DK**-0.5, _inverse_length(k)
    gates = x + token * W + C + HV * DV
    beta, g = _gates(gates, head, a_log, dt_bias, token < end, HV)
    a, last = tl.cumsum(g, 0), tl.sum(g, 0)
    row, column = i[:, None], i[None, :]
    # The upper triangle would overflow, so it is masked before the exponential.
    decay = tl.exp(tl.where(row >= column, a[:, None] - a[None, :], float("-inf")))
    decay *= k_scale[None, :]
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay * q_scale[:, None]
    n = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * (k_scale * beta)[:, None]
    joined = (row // 2 == column // 2) & (row > column)
    inverse = tl.where(row == column, 1.0, tl.where(joined, -n, 0.0))
    for power in range(1, 6):
        block, other = row >> power, column >> power
        m = tl.where((block % 2 == 1) & (other == block - 1), n, 0.0)
        half = tl.dot(inverse, m, input_precision=PRECISION)
        inverse -= tl.dot(half, inverse, input_precision=PRECISION)
    matrix = (tile * HV + head) * CHUNK * CHUNK + row * CHUNK + column
    tl.store(systems + matrix, inverse * beta[None, :])
    tl.store(scores + matrix, score)
    factor = factors + (tile * HV + head) * 4 * CHUNK + i
    tl.store(factor, q_scale * tl.exp(a))
    tl.store(factor + CHUNK, k_scale * tl.exp(a))
    tl.store(factor + 2 * CHUNK, k_scale * tl.exp(last - a))
    tl.store(factor + 3 * CHUNK, tl.exp(last + tl.zeros_like(a)))


@triton.jit(do_not_specialize_on_alignment=["segments"])
def _chunk_rule(
    qkv, rule, segments, factors, systems, scores, out,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program computes COLUMNS columns of one head's state and outputs, of one sequence."""
    C: tl.constexpr = 2 * HK * DK + HV * DV
    PRECISION: tl.constexpr = "ieee" if qkv.dtype.element_ty == tl.float32 else "tf32"
    segment, head = segments + tl.program_id(0) * 5, tl.program_id(1)
    row, start, end = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    has_state, tile = tl.load(segment + 3), tl.load(segment + 4)
    i = tl.arange(0, CHUNK)
    dim = tl.arange(0, triton.next_power_of_2(DK))
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    state_ptrs = rule + ((row * HV + head) * DK + dim[:, None]) * DV + column[None, :]
    in_head = (column < DV)[None, :]
    state = tl.load(state_ptrs, mask=(dim < DK * has_state)[:, None] & in_head, other=0.0)
    q_ptrs = qkv + head // (HV // HK) * DK
    v_ptrs = qkv + 2 * HK * DK + head * DV + column[None, :]
    # With more than one stage, this would need more shared memory than most GPUs have. Addresses
    # that are computed before the loop would take registers, and some would be spilled.
    for first in tl.range(start, end, CHUNK, num_stages=1, disable_licm=True):
        token = first + i
        mask = (token < end)[:, None] & in_head
        factor = factors + (tile * HV + head) * 4 * CHUNK
        matrix = (tile * HV + head) * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
        k = _load_heads(q_ptrs + HK * DK, token, end, C, DK).to(tl.float32)
        v = tl.load(v_ptrs + token[:, None] * C, mask=mask, other=0.0).to(tl.float32)
        known = tl.dot(k, state, input_precision=PRECISION)
        right = v - known * tl.load(factor + CHUNK + i)[:, None]
        corrections = tl.dot(tl.load(systems + matrix), right, input_precision=PRECISION)
        q = _load_heads(q_ptrs, token, end, C, DK).to(tl.float32)
        o = tl.dot(q, state, input_precision=PRECISION) * tl.load(factor + i)[:, None]
        o = tl.dot(tl.load(scores + matrix), corrections, o, input_precision=PRECISION)
        out_ptrs = out + (token[:, None] * HV + head) * DV + column[None, :]
        tl.store(out_ptrs, o.to(out.dtype.element_ty), mask=mask)
        corrections *= tl.load(factor + 2 * CHUNK + i)[:, None]
        state *= tl.load(factor + 3 * CHUNK)
        state = tl.dot(tl.trans(k), corrections, state, input_precision=PRECISION)
        tile += 1
    tl.store(state_ptrs, state, mask=(dim < DK)[:, None] & in_head)


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _gated_norm(
    x, norm_weight, tiles, out, eps, C: tl.constexpr, HV: tl.constexpr, DV: tl.constexpr
):
    """One program replaces the outputs of one tile and head by their gated norm."""
    tile, head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    token = (tl.load(tile + 4) + tl.arange(0, CHUNK))[:, None]
    column = tl.arange(0, triton.next_power_of_2(DV))[None, :]
    mask = (token < tl.load(tile + 2)) & (column < DV)
    out_ptrs = out + (token * HV + head) * DV + column
    o = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    z_ptrs = x + token * (C + HV * DV + 2 * HV) + C + head * DV + column
    z = tl.load(z_ptrs, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(norm_weight + column, mask=column < DV, other=0.0)
    o = _norm_and_gate(o, z, scale, eps, DV)
    tl.store(out_ptrs, o.to(out.dtype.element_ty), mask=mask)


def tables(segments: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `segments` [segments, 5] and `tiles` [tiles, 5], int64, of one step for all layers."""
    if segments.tensors is None:
        has_state = np.logical_not(segments.is_first)
        columns = segments.rows, segments.starts, segments.ends, has_state, segments.starts
        table = np.array(columns, dtype=np.int64).T
        counts = np.maximum(1, -(-(table[:, 2] - table[:, 1]) // CHUNK.value))
        first_tile = counts.cumsum() - counts
        tiles = table.repeat(counts, axis=0)
        tiles[:, 4] += (np.arange(len(tiles)) - first_tile.repeat(counts)) * CHUNK.value
        table[:, 4] = first_tile
        both = to_device(np.concatenate((table, tiles)), device)
        segments.tensors = both[: len(table)], both[len(table) :]
    return segments.tensors


def chunk(
    layer: Any, x: Tensor, conv: Tensor, rule: Tensor, segments: Any, out: Tensor,
) -> None:
    """Compute many tokens of each sequence, from x [T, C + Hv Dv + 2 Hv] into out [T, Hv Dv].

    The states conv [N, 3, C], in the dtype of x, and rule [N, Hv, Dk, Dv] float32 are changed.
    `segments` are the `Segments` of the reference. All tensors are contiguous.
    """
    C = conv.shape[2]
    HK, HV, DK, DV = layer.sizes
    segment_table, tiles = tables(segments, x.device)
    num_segments = len(segment_table)
    num = len(tiles)
    inputs = dict(C=C, W=x.shape[1])
    sizes = dict(HK=HK, HV=HV, DK=DK, DV=DV)
    qkv = x.new_empty((len(x), C))
    factors = rule.new_empty((num, HV, 4, CHUNK.value))
    systems, scores = (rule.new_empty((num, HV, CHUNK.value, CHUNK.value)) for _ in range(2))
    exact = x.dtype == torch.float32  # products without matrix units, which need more registers
    grid = (num, -(-C // TILE_CHANNELS.value), 1)
    launch(_convolve, grid, (x, layer.conv1d, conv, tiles, qkv), inputs, num_warps=4)
    solve = (x, qkv, layer.a_log, layer.dt_bias, tiles, factors, systems, scores)
    launch(_solve, (num, HV, 1), solve, sizes, num_warps=16 if exact else 4)
    columns = 16 if exact else 32
    args = (qkv, rule, segment_table, factors, systems, scores, out)
    grid = num_segments, HV, -(-DV // columns)
    constants = dict(sizes, COLUMNS=columns)
    launch(_chunk_rule, grid, args, constants, num_warps=8 if exact else 4)
    norm = (x, layer.norm, tiles, out, layer.eps)
    launch(_gated_norm, (num, HV, 1), norm, dict(C=C, HV=HV, DV=DV), num_warps=4)
