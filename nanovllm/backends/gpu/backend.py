"""The backend of a GPU."""

import os
from functools import partial

import torch

from nanovllm.backends.gpu.attention import TritonAttention, check_capability
from nanovllm.backends.gpu.graphs import DecodeGraphs, cuda_capture
from nanovllm.backends.gpu.kernels import int8, pointwise, sampling
from nanovllm.models.backend import Backend

LEAST_CAPABILITY = (7, 5)  # Turing, the first that .ci/compile_kernels.py compiles for


def make_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the backend. Raises ValueError if the device cannot run the kernels."""
    on_gpu = device.type == "cuda"
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"attention_backend='triton' needs a GPU, and the device is {device.type!r}; use "
            "attention_backend='auto', or set TRITON_INTERPRET=1 to run the kernels in Triton's "
            "interpreter (very slowly)"
        )
    instead = "attention_backend='sdpa' runs on any GPU"
    check_capability(device, LEAST_CAPABILITY, "the Triton kernels need", instead)
    return Backend(
        int8={"linear": int8.linear, "pack": int8.pack},
        attention=TritonAttention,
        add_rms_norm=pointwise.add_rms_norm,
        silu_and_mul=pointwise.silu_and_mul,
        fused_attention=True,
        sample=sampling.sample,
        capture_decode=partial(DecodeGraphs, capture=cuda_capture) if on_gpu else None,
    )
