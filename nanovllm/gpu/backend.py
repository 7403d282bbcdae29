"""The backend of a GPU."""

import os
from functools import partial

import torch

from nanovllm.gpu.attention import TritonAttention
from nanovllm.gpu.graphs import DecodeGraphs, cuda_capture
from nanovllm.gpu.kernels import int8, pointwise, sampling
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
    if on_gpu and not torch.version.hip:
        capability = torch.cuda.get_device_capability(device)
        if capability < LEAST_CAPABILITY:
            raise ValueError(
                f"the Triton kernels need compute capability {dotted(LEAST_CAPABILITY)} or higher, "
                f"and {torch.cuda.get_device_name(device)} has {dotted(capability)}; "
                "attention_backend='sdpa' runs on any GPU"
            )
    return Backend(
        int8={"linear": int8.linear, "pack": int8.pack},
        attention=TritonAttention,
        add_rms_norm=pointwise.add_rms_norm,
        silu_and_mul=pointwise.silu_and_mul,
        fused_attention=True,
        sample=sampling.sample,
        capture_decode=partial(DecodeGraphs, capture=cuda_capture) if on_gpu else None,
    )


def dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
