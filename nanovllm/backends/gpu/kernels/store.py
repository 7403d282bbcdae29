"""RMSNorm of q and k, rotary embedding, and the stores to the KV cache, in one launch.

One program takes one token and HEADS of the H + 2K heads of its packed projection:

    qkv [T, (H + 2K) D]    q_0 ... q_H-1   |  k_0 ... k_K-1                |  v_0 ... v_K-1
                           norm, rotary    |  norm, rotary                 |  unchanged
    written to             q_out [T, H, D] |  k_cache[slot // block size,  |  v_cache, same slot
                                           |    head, slot % block size]   |

It changes the slots of the given tokens in one layer's cache, which may be in fp8 (models/fp8.py).
The reference uses models/layers.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.gpu.kernels.launch import launch

# One program computes this many heads.
HEADS = tl.constexpr(8)


@triton.jit
def _to_cache(x, scale, dtype: tl.constexpr):
    """x in the cache's dtype: in fp8 x / scale, at most 448 in size, and NaN for NaN."""
    if dtype == tl.float8e4nv:
        x = x.to(tl.float32) / scale
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _norm_rope_store(
    qkv, q_weight, k_weight, cos, sin, slot_mapping, q_out, k_cache, v_cache, eps, k_scale, v_scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    dtype = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q, is_k = head < H, (head >= H) & (head < H + K)
    is_v = (head >= H + K) & (head < H + 2 * K)
    dim = tl.arange(0, triton.next_power_of_2(HALF))
    in_range = dim < HALF
    mask = (head < H + 2 * K)[:, None] & in_range[None, :]
    offsets = (token * (H + 2 * K) + head)[:, None] * D + dim[None, :]
    low = tl.load(qkv + offsets, mask=mask, other=0.0)  # [HEADS, D / 2]
    high = tl.load(qkv + offsets + HALF, mask=mask, other=0.0)
    # The second half of `sin` has the positive sign.
    c = tl.load(cos + token * D + dim, mask=in_range, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * D + HALF + dim, mask=in_range, other=0.0).to(tl.float32)[None, :]
    x, y = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        inverse_rms = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        q_low = tl.load(q_weight + dim, mask=in_range, other=0.0)[None, :]
        q_high = tl.load(q_weight + HALF + dim, mask=in_range, other=0.0)[None, :]
        k_low = tl.load(k_weight + dim, mask=in_range, other=0.0)[None, :]
        k_high = tl.load(k_weight + HALF + dim, mask=in_range, other=0.0)[None, :]
        low_weight = tl.where(is_q[:, None], q_low, k_low)
        high_weight = tl.where(is_q[:, None], q_high, k_high)
        # Rounding where PyTorch's layers round gives transformers' results in half precision.
        normed: tl.constexpr = low_weight.dtype
        x = (x * inverse_rms).to(normed).to(tl.float32) * low_weight.to(tl.float32)
        y = (y * inverse_rms).to(normed).to(tl.float32) * high_weight.to(tl.float32)
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
    rotated_low = (x * c - y * s).to(dtype)
    rotated_high = (y * c + x * s).to(dtype)

    q_ptrs = q_out + (token * H + head)[:, None] * D + dim[None, :]
    q_mask = is_q[:, None] & in_range[None, :]
    tl.store(q_ptrs, rotated_low, mask=q_mask)
    tl.store(q_ptrs + HALF, rotated_high, mask=q_mask)
    # Slots are int64, because the cache may have more than 2^31 elements.
    slot = tl.load(slot_mapping + token)
    kv_head = tl.where(is_k, head - H, head - H - K)
    offsets = ((slot // BLOCK * K + kv_head) * BLOCK + slot % BLOCK)[:, None] * D + dim[None, :]
    k_mask, v_mask = is_k[:, None] & in_range[None, :], is_v[:, None] & in_range[None, :]
    cache_dtype: tl.constexpr = k_cache.dtype.element_ty
    tl.store(k_cache + offsets, _to_cache(rotated_low, k_scale, cache_dtype), mask=k_mask)
    tl.store(k_cache + offsets + HALF, _to_cache(rotated_high, k_scale, cache_dtype), mask=k_mask)
    tl.store(v_cache + offsets, _to_cache(low, v_scale, cache_dtype), mask=v_mask)
    tl.store(v_cache + offsets + HALF, _to_cache(high, v_scale, cache_dtype), mask=v_mask)


def norm_rope_store(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor,
    sin: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0, q: Tensor | None = None,
) -> Tensor:
    """Return q [T, H, D] after norm and rotary (arXiv:2104.09864); store k and v in their slots.

    The result is written to `q` if it is given.

    qkv [T, (H + 2K) D]; norm weights [D], or None for no norm; cos, sin [T, 1, D] with the halves
    (cos, cos) and (-sin, sin); slot_mapping [T] int64; k_cache, v_cache [blocks, K, block size, D].
    All tensors are contiguous. The scales divide k and v if the caches are float8_e4m3fn.
    """
    num_tokens, width = qkv.shape
    _, K, BLOCK, D = k_cache.shape
    H = width // D - 2 * K
    assert cos.shape[-1] == sin.shape[-1] == D
    if q is None:
        q = torch.empty((num_tokens, H, D), dtype=qkv.dtype, device=qkv.device)
    norm = q_weight is not None and k_weight is not None
    weights = (q_weight, k_weight) if norm else (qkv, qkv)
    args = (qkv, *weights, cos, sin, slot_mapping, q, k_cache, v_cache, eps, k_scale, v_scale)
    constants = dict(H=H, K=K, D=D, BLOCK=BLOCK, NORM=norm)
    grid = (num_tokens, -(-(H + 2 * K) // HEADS.value), 1)
    launch(_norm_rope_store, grid, args, constants, num_warps=4)
    return q
