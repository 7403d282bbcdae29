"""Between the projection and attention, in one launch: RMSNorm of q and k, rotary, KV store.

Owns: nothing. Given: the packed projection and the cos and sin of the step's positions. Mutates: the
slots of the step's tokens in one layer's cache. The reference is nanovllm.layers.

One program takes a token and a few of its H + 2K heads: q heads are normalised, turned and written
to a tensor of their own, k heads the same but to the cache, v heads to the cache as they are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.layers.rotary import norm_and_rotate

HEADS = 8  # of one program


@triton.jit
def _rope_store(
    qkv, q_weight, k_weight, cos, sin, slots, q_out, k_cache, v_cache, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    dtype = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q, is_k = head < H, (head >= H) & (head < H + K)
    is_v = (head >= H + K) & (head < H + 2 * K)
    dim = tl.arange(0, HALF_PAD)
    real = dim < HALF
    mask = (head < H + 2 * K)[:, None] & real[None, :]
    at = (token * (H + 2 * K) + head)[:, None] * D + dim[None, :]
    a = tl.load(qkv + at, mask=mask, other=0.0)  # [HEADS, D / 2]
    b = tl.load(qkv + at + HALF, mask=mask, other=0.0)
    c = tl.load(cos + token * D + dim, mask=real, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * D + HALF + dim, mask=real, other=0.0).to(tl.float32)[None, :]
    x, y = a.to(tl.float32), b.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        q_low = tl.load(q_weight + dim, mask=real, other=0.0)[None, :]
        q_high = tl.load(q_weight + HALF + dim, mask=real, other=0.0)[None, :]
        k_low = tl.load(k_weight + dim, mask=real, other=0.0)[None, :]
        k_high = tl.load(k_weight + HALF + dim, mask=real, other=0.0)[None, :]
        low = tl.where(is_q[:, None], q_low, k_low).to(tl.float32)
        high = tl.where(is_q[:, None], q_high, k_high).to(tl.float32)
        # Rounded where the layers round, so that half precision gives transformers' numbers.
        x = ((x * inverse).to(dtype).to(tl.float32) * low).to(dtype).to(tl.float32)
        y = ((y * inverse).to(dtype).to(tl.float32) * high).to(dtype).to(tl.float32)
    turned_a = (x * c - y * s).to(dtype)
    turned_b = (y * c + x * s).to(dtype)

    q_at = q_out + (token * H + head)[:, None] * D + dim[None, :]
    q_mask = is_q[:, None] & real[None, :]
    tl.store(q_at, turned_a, mask=q_mask)
    tl.store(q_at + HALF, turned_b, mask=q_mask)
    slot = tl.load(slots + token)  # int64: the cache may hold more than 2^31 elements
    k_head = tl.where(is_k, head - H, head - H - K)
    where = ((slot // BLOCK * K + k_head) * BLOCK + slot % BLOCK)[:, None] * D + dim[None, :]
    k_mask, v_mask = is_k[:, None] & real[None, :], is_v[:, None] & real[None, :]
    tl.store(k_cache + where, turned_a, mask=k_mask)
    tl.store(k_cache + where + HALF, turned_b, mask=k_mask)
    tl.store(v_cache + where, a, mask=v_mask)
    tl.store(v_cache + where + HALF, b, mask=v_mask)


def rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """q [T, H, D], normalised if there are weights, and turned; k and v go to their slots.

    qkv [T, (H + 2K) D] packed; weights [D] or None; cos, sin [T, 1, D]; slots [T] int64;
    k_cache, v_cache [blocks, K, block size, D]. All contiguous.
    """
    tokens, width = qkv.shape
    _, kv_heads, block, dim = k_cache.shape
    heads = width // dim - 2 * kv_heads
    assert cos.shape[-1] == sin.shape[-1] == dim
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    norm = q_weight is not None and k_weight is not None
    _rope_store[(tokens, triton.cdiv(heads + 2 * kv_heads, HEADS))](
        qkv, q_weight if norm else qkv, k_weight if norm else qkv, cos, sin, slots, q, k_cache,
        v_cache, eps,
        H=heads, K=kv_heads, D=dim, HALF_PAD=triton.next_power_of_2(dim // 2), BLOCK=block,
        NORM=norm, HEADS=HEADS, num_warps=4,
    )  # fmt: skip
    return q


def reference(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    _, kv_heads, block, dim = k_cache.shape
    q, k, v = norm_and_rotate(qkv, kv_heads, dim, q_weight, k_weight, eps, cos, sin)
    k_cache[slots // block, :, slots % block] = k
    v_cache[slots // block, :, slots % block] = v
    return q
