"""What to run on: the device, the dtype, and which set of kernels.

Owns: nothing. Given: what the config asks for, and the machine. Raises ValueError where the two do not
fit.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.config import ModelConfig
from nanovllm.layers.ops import PLAIN, Ops
from nanovllm.runner.batch import SamplingBatch
from nanovllm.runner.sampler import sample

# (model config, blocks, block size, dtype, device) -> backend
MakeAttention: TypeAlias = Callable[
    [ModelConfig, int, int, torch.dtype, torch.device], AttentionBackend
]
Draw: TypeAlias = Callable[[Tensor, SamplingBatch], Tensor]  # logits [R, V] -> tokens [R]

logger = logging.getLogger("nanovllm")


def pick_kernels(
    name: str, device: torch.device, dtype: torch.dtype
) -> tuple[MakeAttention, Ops, Draw]:
    """(attention backend, what runs between the matrix products, the sampler) of a backend's name."""
    if name == "auto":
        name = "triton" if device.type == "cuda" else "sdpa"
        if name == "sdpa" and dtype is torch.float16:
            logger.warning(
                "torch's attention is used, which is slower: there is no other in float16"
            )
        elif name == "sdpa":
            try:
                return numba_kernels(device, dtype)
            except ImportError as error:
                logger.warning("torch's attention is used, which is slower: %s", error)
    if name == "sdpa":
        return SdpaAttention, PLAIN, sample
    try:
        if name == "numba":
            return numba_kernels(device, dtype)
        return triton_kernels(device)
    except ImportError as error:
        raise ValueError(
            f"attention_backend={name!r} needs {name.title()} ({error}); pip install {name}, or use "
            "attention_backend='sdpa'"
        ) from error


def numba_kernels(device: torch.device, dtype: torch.dtype) -> tuple[MakeAttention, Ops, Draw]:
    if device.type != "cpu" or dtype is torch.float16:
        raise ValueError(
            "attention_backend='numba' is for a CPU, in float32 or bfloat16, and this is "
            f"{device.type!r} with {str(dtype)[6:]}; use attention_backend='sdpa'"
        )
    from nanovllm.attention.numba import NumbaAttention
    from nanovllm.kernels import cpu
    from nanovllm.models.compiled import compile_layers

    return NumbaAttention, Ops(cpu.add_rms_norm, cpu.silu_and_mul, compile_layers), cpu.sample


def triton_kernels(device: torch.device) -> tuple[MakeAttention, Ops, Draw]:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"attention_backend='triton' needs a GPU, and the device is {device.type!r}; use "
            "attention_backend='auto', or set TRITON_INTERPRET=1 to run the kernels in Triton's "
            "interpreter (very slowly)"
        )
    from nanovllm.attention.triton import TritonAttention
    from nanovllm.kernels import pointwise, sampling

    return TritonAttention, Ops(pointwise.add_rms_norm, pointwise.silu_and_mul), sampling.sample


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' was asked for, but torch finds no GPU; use device='cpu'")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def pick_dtype(name: str, device: torch.device, stored: str | None) -> torch.dtype:
    if name == "auto":
        if device.type == "cpu":
            name = "bfloat16" if cpu_has_fast_bf16() else "float32"
        else:
            name = stored or "bfloat16"
            if name == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
                name = "float16"  # older cards do not know bf16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def cpu_has_fast_bf16() -> bool:
    """Whether the processor multiplies bf16 in hardware (AVX512-BF16, AMX, Arm's BF16)."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return any(f" {flag}" in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one, which Triton launches on: it is each thread's own, and others' to change."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def torch_defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Build tensors on the device and in the dtype that they end up in; never twice."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
