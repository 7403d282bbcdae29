"""The backend of a CPU, in float32 and bfloat16."""

import torch

from nanovllm.backends.cpu import int8, jit, pointwise
from nanovllm.backends.cpu.attention import NumbaAttention
from nanovllm.backends.cpu.compile import is_ready
from nanovllm.backends.cpu.fused_decode import fuse_layers
from nanovllm.backends.cpu.linear import linear, pack
from nanovllm.backends.cpu.sampler import sample, token_logprobs
from nanovllm.models.backend import Backend

__all__ = ["is_ready", "make_backend"]


def make_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the backend. Raises ValueError for a device or dtype that it does not support."""
    if device.type != "cpu" or dtype is torch.float16:
        raise ValueError(
            "attention_backend='numba' is for a CPU, in float32 or bfloat16, and this is "
            f"{device.type!r} with {str(dtype)[6:]}; use attention_backend='sdpa'"
        )
    return Backend(
        linear=linear,
        add_rms_norm=pointwise.add_rms_norm,
        silu_and_mul=pointwise.silu_and_mul,
        attention=NumbaAttention,
        fused_attention=True,
        sample=sample,
        token_logprobs=token_logprobs,
        pack=pack,
        int8={"make_weight": int8.PackedWeight.empty, "linear": int8.linear},
        compile_layers=fuse_layers,
        guard=jit.guard,
    )
