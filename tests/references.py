"""The Triton kernels in plain torch; those that are missing here have theirs in nanovllm.models."""

import torch
from torch import Tensor

from nanovllm.models.layers import rms_norm, rotate


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
) -> Tensor:
    """Compute the same as `attend` and `attend_decode`, one sequence at a time, in float32."""
    out = torch.empty_like(q)
    group_size, block_size = q.shape[1] // k_cache.shape[1], k_cache.shape[2]
    starts = query_start_loc.tolist()
    for seq, context_len in enumerate(context_lens.tolist()):
        tokens = slice(starts[seq], starts[seq + 1])
        position = torch.arange(context_len, device=q.device)
        block = block_tables[seq].long()[position // block_size]
        k, v = (  # [context_len, H, D]
            cache[block, :, position % block_size].float().repeat_interleave(group_size, 1)
            for cache in (k_cache, v_cache)
        )
        query_position = position[context_len - (tokens.stop - tokens.start) :]
        scores = torch.einsum("qhd,lhd->hql", q[tokens].float(), k) / q.shape[2] ** 0.5
        scores = scores.masked_fill(position > query_position[:, None], float("-inf"))
        out[tokens] = torch.einsum("hql,lhd->qhd", scores.softmax(-1), v).to(q.dtype)
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
) -> Tensor:
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    heads = qkv.unflatten(-1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q, k = rotate(q, (cos, sin)), rotate(k, (cos, sin))
    k_cache[slot_mapping // block_size, :, slot_mapping % block_size] = k
    v_cache[slot_mapping // block_size, :, slot_mapping % block_size] = v
    return q
