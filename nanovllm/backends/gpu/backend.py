"""The backend of a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.backends.gpu.attention import InvariantAttention, PlainStoreAttention, TritonAttention
from nanovllm.backends.gpu.chunk_graphs import ChunkGraphs
from nanovllm.backends.gpu.graphs import CudaCapture, DecodeGraphs
from nanovllm.backends.gpu.kernels import delta_rule, linear, pointwise, sampler
from nanovllm.backends.int4 import LM_HEAD, Int4Weight
from nanovllm.backends.int8 import Int8Weight
from nanovllm.config import EngineConfig
from nanovllm.models import raw_logprobs
from nanovllm.models.backend import Backend, check_capability
from nanovllm.models.layers import Linear
from nanovllm.models.model_config import ModelConfig

MIN_CAPABILITY = (7, 5)  # Turing, the first that .ci/compile_kernels.py compiles for


def make_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the backend. Raises ValueError if the device cannot run the kernels."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"attention_backend='triton' needs a GPU, and the device is {device.type!r}; use "
            "attention_backend='auto', or set TRITON_INTERPRET=1 to run the kernels in Triton's "
            "interpreter (very slowly)"
        )
    instead = "attention_backend='sdpa' runs on any GPU"
    check_capability(device, MIN_CAPABILITY, "the Triton kernels need", instead)
    return GpuBackend(device, dtype)


class GpuBackend(Backend):
    """Triton kernels, and decode steps as CUDA graphs."""

    attention_class = TritonAttention
    add_rms_norm = staticmethod(pointwise.add_rms_norm)
    silu_and_mul = staticmethod(pointwise.silu_and_mul)
    gelu_and_mul = staticmethod(pointwise.gelu_and_mul)
    sample = staticmethod(sampler.sample)

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.captures = device.type == "cuda"  # not in Triton's interpreter

    def delta_rule(self) -> Any:
        # The products of `chunk` would take more than the 64 KiB of shared memory of Turing GPUs.
        if self.captures and torch.cuda.get_device_capability(self.device) < (8, 0):
            return SimpleNamespace(decode=delta_rule.decode)
        return delta_rule

    def is_checked(self) -> bool:
        return not self.captures  # nothing is compiled for Triton's interpreter

    def replace_kernel(self, name: str, plain: Backend) -> bool:
        if name == "norm_rope_store":
            self.attention_class = PlainStoreAttention
            return True
        names = {"attend": "attention_class", "expert_mlp": "experts"}
        attribute = names.get(name, name)
        setattr(self, attribute, getattr(plain, attribute))
        if name in ("attend", "expert_mlp", "sample"):
            self.captures = False  # plain torch waits for the device in these
        return True

    def experts(self, module: Linear) -> Any:
        return linear

    def quantized(self, weights: str) -> Backend:
        backends = {"int8": GpuInt8Backend, "int4": GpuInt4Backend}
        return backends[weights](self.device, self.dtype)

    def batch_invariant(self, config: EngineConfig, model: ModelConfig) -> Backend:
        for name, value, needed in (
            ("dtype", str(self.dtype).removeprefix("torch."), "bfloat16"),
            ("quantization", {"int8": "int8", "int4": "int4"}.get(config.quantization or ""), None),
            ("kv_cache_dtype", config.kv_cache_dtype, "auto"),
            ("tensor_parallel_size", config.tensor_parallel_size, 1),
        ):
            if value != needed:
                raise ValueError(
                    f"batch_invariant=True on a GPU needs {name}={needed!r}, not {value!r}; leave "
                    "one of them out"
                )
        if type(model) is not ModelConfig:
            raise ValueError(
                f"batch_invariant=True on a GPU is for dense models, not {model.architecture}; "
                "leave it out"
            )
        return InvariantGpuBackend(self.device, self.dtype)

    def capture_decode(
        self,
        decode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        positions: np.ndarray,
        min_over_ranks: Callable[[int], int],
    ) -> DecodeGraphs:
        return DecodeGraphs(decode, positions, self.device, CudaCapture, min_over_ranks)

    def capture_chunks(
        self, model: Any, attention: Any, graphs: DecodeGraphs, max_tokens: int
    ) -> Any:
        chunks = ChunkGraphs(model, attention, graphs, max_tokens)
        return chunks if chunks.steps else None


class InvariantGpuBackend(GpuBackend):
    """The same with the same bits of a row whatever else a step computes."""

    attention_class = InvariantAttention
    linear = staticmethod(linear.invariant_linear)

    @staticmethod
    def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
        # torch sums a row in an order that depends on the bytes at which the row begins.
        padded = F.pad(logits, (0, -logits.shape[1] % 8), value=float("-inf"))
        return raw_logprobs.token_logprobs(padded, tokens, k)


class GpuInt8Backend(GpuBackend):
    """The same with the weights of linear layers in int8."""

    linear = staticmethod(linear.linear)

    def make_weight(self, outputs: int, inputs: int, names: list[str]) -> Any:
        return Int8Weight.empty(self.empty, outputs, inputs)


class GpuInt4Backend(GpuInt8Backend):
    """The same with the weights of linear layers in int4, except the head."""

    def make_weight(self, outputs: int, inputs: int, names: list[str]) -> Any:
        if LM_HEAD in names:
            return super().make_weight(outputs, inputs, names)
        return Int4Weight.empty(self.empty, outputs, inputs)
