"""The Triton kernels in plain torch; those that are missing here have theirs in nanovllm.models.

And an fp8 KV cache that is emulated in the dtype of the model, and what near-ties allow.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.models.attention import PlainAttention
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.fp8 import FP8, Scales, to_fp8
from nanovllm.models.layers import rms_norm, rotate


def plain_attention(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """Attention of q [Q, H, D] at the end of the context k, v [L, K, D], written out.

    With a window, a query attends to so many tokens up to itself.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,lhd->hql", q, k) / q.shape[2] ** 0.5
    past = len(k) - len(q)
    ahead = torch.ones_like(scores[0], dtype=torch.bool).triu(past + 1)
    if window:
        ahead |= torch.ones_like(ahead).tril(past - window)
    return torch.einsum("hql,lhd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int = 0,
) -> Tensor:
    """Compute the same as `attend` and `attend_decode`, one sequence at a time, in float32."""
    out = torch.empty_like(q)
    block_size, starts = k_cache.shape[2], query_start_loc.tolist()
    for seq, context_len in enumerate(context_lens.tolist()):
        tokens = slice(starts[seq], starts[seq + 1])
        position = torch.arange(context_len, device=q.device)
        block = block_tables[seq].long()[position // block_size]
        k, v = (  # [context_len, K, D]
            scale * cache[block, :, position % block_size].float()
            for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        out[tokens] = plain_attention(q[tokens].float(), k, v, window).to(q.dtype)
    return out


def norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    heads = qkv.unflatten(-1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q, k = rotate(q, (cos, sin)), rotate(k, (cos, sin))
    if k_cache.dtype == FP8:
        k, v = to_fp8(k, k_scale), to_fp8(v, v_scale)
    k_cache[slot_mapping // block_size, :, slot_mapping % block_size] = k
    v_cache[slot_mapping // block_size, :, slot_mapping % block_size] = v
    return q


def round_to_e4m3(x: Tensor) -> Tensor:
    """The numbers of e4m3 that are nearest to x, in float32: ties to even, at most 448 in size."""
    x = x.float().clamp(-448, 448)
    _, exponent = torch.frexp(x)  # |x| is at least 2^(exponent - 1) and less than 2^exponent
    # The unit of 3 bits of mantissa, and that of subnormal numbers, below 2^-6.
    unit = torch.ldexp(torch.ones_like(x), exponent.clamp(min=-5) - 4)
    return (x / unit).round() * unit


class RoundedAttention(PlainAttention):
    """PlainAttention whose keys and values are rounded as for fp8, in a cache that is not fp8."""

    def __init__(self, *args: Any, rounded_by: list[Scales]) -> None:
        super().__init__(*args[:5])
        self.rounded_by = rounded_by

    def store(self, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        k, v = (
            (round_to_e4m3(x.float() / scale) * scale).to(x.dtype)
            for x, scale in zip((k, v), self.rounded_by[layer], strict=True)
        )
        super().store(layer, k, v, batch)


def count_near_ties(wanted: list, found: list, limit: float = 1e-4) -> int:
    """How many of the outputs differ, all of them only from a near-tie of two tokens on.

    Both are lists of CompletionOutput; `wanted` with logprobs=2 of a greedy choice. Sums in another
    order round differently, so that of two tokens whose log-probabilities are within `limit` either
    may be chosen, and what follows differs. Up to there the tokens are the same.
    """
    num = 0
    for want, have in zip(wanted, found, strict=True):
        pairs = list(zip(want.token_ids, have.token_ids, strict=False))
        first = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            assert len(have.token_ids) == len(want.token_ids)
            continue
        num += 1
        best, second, *_ = sorted((e.logprob for e in want.logprobs[first].values()), reverse=True)
        assert best - second < limit, (first, pairs[first], best, second)
        assert pairs[first][1] in want.logprobs[first], "neither of the two best"
    return num
