"""The gated delta rule in plain torch, the reference of the kernels (arXiv:2412.06464).

A layer of linear attention keeps, for each sequence and value head, a matrix S [Dk, Dv] that maps
keys to values. A token with key k and value v corrects it:

    S <- e^g S                      forget
    d  = beta (v - S^T k)           the difference from the value that S has for k
    S <- S + k d^T                  the correction
    o  = S^T q                      the output

A convolution over the last four tokens comes before it. The state of a sequence is S and the last
three inputs of the convolution. It has the same size after any number of tokens.

`decode` computes one token of many sequences, and `chunk` many tokens of each sequence, 64 at a
time: the corrections of 64 tokens are the solution of a triangular system. Both change the states.

Shapes: Q tokens of a sequence, S sequences, C channels of the convolution, Hk key heads of Dk
numbers, Hv value heads of Dv numbers, N states. Value head h belongs to key head h // (Hv / Hk).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.models.layers import rms_norm

if TYPE_CHECKING:
    from nanovllm.features.models.hybrid.qwen3_5 import LinearAttention

CHUNK = 64  # tokens of a triangular system


@dataclass
class Segments:
    """Consecutive tokens of some sequences in a step, as lists of the same length."""

    rows: list[int]  # the state of each sequence
    starts: list[int]  # the index of its first token in the step
    ends: list[int]
    is_first: list[bool]  # whether it begins with token 0, and so with a state of zeros
    tensors: Any = None  # made from the lists by kernels, once for all layers


def split(layer: LinearAttention, x: Tensor) -> list[Tensor]:
    """Split projections [T, C + Hv Dv + 2 Hv] -> mixed [T, C], z [T, Hv Dv], b and a [T, Hv]."""
    return list(x.split([*layer.in_proj.projections.values()], dim=-1))


def gates(layer: LinearAttention, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return beta and g in float32, from b and a [..., Hv]."""
    return b.float().sigmoid(), -layer.a_log.exp() * F.softplus(a.float() + layer.dt_bias)


def convolve(layer: LinearAttention, window: Tensor) -> Tensor:
    """Return q, k and v [..., Q, C] in float32, from a window of projections [..., Q + 3, C].

    They are the silu of a causal convolution. The heads of q and k then get unit length, and q is
    divided by sqrt(Dk).
    """
    key_heads, _, key_dim, _ = layer.sizes
    num = window.shape[-2] - 3
    wide = window.float()
    weight = layer.conv1d
    taps = [wide[..., j : j + num, :] * weight[j] for j in range(4)]
    mixed = F.silu(taps[0] + taps[1] + taps[2] + taps[3]).to(window.dtype).float()
    size = key_heads * key_dim
    for start, scale in ((0, key_dim**-0.5), (size, 1.0)):
        x = mixed[..., start : start + size].unflatten(-1, (key_heads, key_dim))
        x *= torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6) * scale
    return mixed


def heads(layer: LinearAttention, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split [Q, C] -> q, k [Q, Hv, Dk] and v [Q, Hv, Dv]."""
    key_heads, value_heads, key_dim, value_dim = layer.sizes
    size = key_heads * key_dim
    q, k, v = mixed.split([size, size, value_heads * value_dim], dim=-1)
    q, k = (
        x.unflatten(-1, (key_heads, key_dim)).repeat_interleave(value_heads // key_heads, dim=-2)
        for x in (q, k)
    )
    return q, k, v.unflatten(-1, (value_heads, value_dim))


def gated_norm(layer: LinearAttention, o: Tensor, x: Tensor) -> Tensor:
    """Return RMSNorm(o) * silu(z) [Q, Hv Dv] in the dtype of x, of o [Hv, Q or more, Dv]."""
    o = o[:, : len(x)].transpose(0, 1)
    z = split(layer, x)[1].float().view_as(o)
    return (rms_norm(o, layer.norm, layer.eps) * F.silu(z)).flatten(1).to(x.dtype)


def decode(layer: LinearAttention, x: Tensor, conv: Tensor, rule: Tensor, rows: Tensor) -> Tensor:
    """Compute one token of each of the sequences in `rows` [S].

    x [S, C + Hv Dv + 2 Hv] are the projections, and conv [N, 3, C] and rule [N, Hv, Dk, Dv] the
    states. Returns [S, Hv Dv].
    """
    mixed, _, b, a = split(layer, x)
    window = torch.cat((conv[rows], mixed.unsqueeze(1)), dim=1)
    conv[rows] = window[:, 1:]
    q, k, v = heads(layer, convolve(layer, window)[:, 0])
    beta, g = gates(layer, b, a)
    state = rule[rows] * g.exp()[..., None, None]
    difference = beta.unsqueeze(-1) * (v - torch.einsum("shkv,shk->shv", state, k))
    state += k.unsqueeze(-1) * difference.unsqueeze(-2)
    rule[rows] = state
    return gated_norm(layer, torch.einsum("shkv,shk->hsv", state, q), x)


def chunk(
    layer: LinearAttention,
    x: Tensor,
    conv: Tensor,
    rule: Tensor,
    segments: Segments,
    out: Tensor,
) -> None:
    """Compute many tokens of each sequence, from x [T, C + Hv Dv + 2 Hv] into out [T, Hv Dv].

    conv [N, 3, C] and rule [N, Hv, Dk, Dv] are the states.
    """
    lists = segments.rows, segments.starts, segments.ends, segments.is_first
    for row, start, end, is_first in zip(*lists, strict=True):
        if is_first:
            conv[row], rule[row] = 0, 0
        if start == end:  # a fork begins where the chunk begins
            continue
        tokens = x[start:end]
        mixed, _, b, a = split(layer, tokens)
        window = torch.cat((conv[row], mixed))
        conv[row] = window[-3:]
        solved = solve(layer, convolve(layer, window), *gates(layer, b, a))
        out[start:end] = gated_norm(layer, advance(solved, rule[row]), tokens)


class Solved(NamedTuple):
    """The terms without the state, for chunks of `size` tokens: [Hv, chunks, size, ...]."""

    values: Tensor  # [..., Dv]: the corrections for a state of zeros
    keys: Tensor  # [..., Dk]: the corrections are values - keys @ S
    scores: Tensor  # [..., size]: o = q @ S + scores @ corrections
    q: Tensor  # [..., Dk]
    k: Tensor  # [..., Dk]: S <- decay S + k^T @ corrections
    decay: Tensor  # [Hv, chunks, 1, 1]: of a chunk


def solve(layer: LinearAttention, mixed: Tensor, beta: Tensor, g: Tensor) -> Solved:
    """Solve the triangular systems of Q tokens, from mixed [Q, C], beta and g [Q, Hv].

    With the decay D_ij = e^(g_(j+1) + ... + g_i) from token j to a later token i of a chunk, its
    corrections d solve (I + strictly_lower(beta K K^T * D)) d = beta (V - e^a K S).
    """
    q, k, v = heads(layer, mixed)
    num = len(q)
    size = min(CHUNK, num)
    padding = -num % size  # tokens with beta = 0 and g = 0 change nothing

    def chunks(t: Tensor) -> Tensor:  # [Q, Hv, ...] -> [Hv, chunks, size, ...]
        t = F.pad(t, (0, 0) * (t.dim() - 1) + (0, padding))
        return t.transpose(0, 1).unflatten(1, (-1, size))

    q, k, v, beta, g = map(chunks, (q, k, v, beta, g))
    a = g.cumsum(dim=-1)
    # The upper triangle would overflow, so it is masked before the exponential.
    upper = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decay = (a.unsqueeze(-1) - a.unsqueeze(-2)).masked_fill_(upper, -torch.inf).exp_()
    k_beta = k * beta.unsqueeze(-1)
    power = a.exp().unsqueeze(-1)
    system = (k_beta @ k.mT) * decay
    right = torch.cat((v * beta.unsqueeze(-1), k_beta * power), dim=-1)
    # Only the strictly lower triangle of `system` is read.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    last = a[..., -1:]
    k_left = k * (last - a).exp().unsqueeze(-1)
    return Solved(values, keys, (q @ k.mT) * decay, q * power, k_left, last.exp().unsqueeze(-1))


def advance(solved: Solved, state: Tensor) -> Tensor:
    """Advance state [Hv, Dk, Dv], chunk by chunk. Returns the outputs [Hv, chunks * size, Dv]."""
    values, keys, scores, q, k, decay = solved
    out = torch.empty_like(values)
    for i in range(values.shape[1]):
        corrections = torch.baddbmm(values[:, i], keys[:, i], state, alpha=-1)
        out[:, i] = torch.baddbmm(q[:, i] @ state, scores[:, i], corrections)
        torch.baddbmm(state * decay[:, i], k[:, i].mT, corrections, out=state)
    return out.flatten(1, 2)
