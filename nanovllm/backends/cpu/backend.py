"""The backend of a CPU, in float32 and bfloat16."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.backends.cpu import jit, linear
from nanovllm.backends.cpu.attention import NumbaAttention
from nanovllm.backends.cpu.compile import compile_now
from nanovllm.backends.cpu.fused_step import FusedStep
from nanovllm.backends.cpu.kernel_files import marker
from nanovllm.backends.cpu.kernels import (
    delta_layers,
    delta_rule,
    experts,
    int4,
    int8,
    pointwise,
    sampler,
)
from nanovllm.backends.cpu.kernels.fused_layers import FusedLayers
from nanovllm.backends.cpu.kernels.product import PackedWeight
from nanovllm.backends.cpu.memory import WeightMemory
from nanovllm.backends.int4 import LM_HEAD
from nanovllm.models.backend import Backend, num_experts
from nanovllm.models.layers import Linear


def make_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the backend, and compile its kernels unless that is done.

    Raises ValueError for a device or dtype that it does not support, and if Numba cannot compile.
    """
    if device.type != "cpu" or dtype is torch.float16:
        raise ValueError(
            "attention_backend='numba' is for a CPU, in float32 or bfloat16, and this is "
            f"{device.type!r} with {str(dtype)[6:]}; use attention_backend='sdpa'"
        )
    try:
        compile_now(dtype)
    except Exception as error:  # of Numba or LLVM, whose errors have no common class
        raise ValueError(f"Numba cannot compile its kernels ({error!r:.300})") from error
    return CpuBackend(device, dtype)


class CpuBackend(Backend):
    """Kernels that Numba compiles, and products with packed weights."""

    attention_class = NumbaAttention
    weight_class: type[PackedWeight] = linear.PackedFloats
    head_class: type[PackedWeight] = linear.PackedFloats
    linear = staticmethod(linear.linear)
    add_rms_norm = staticmethod(pointwise.add_rms_norm)
    silu_and_mul = staticmethod(pointwise.silu_and_mul)
    gelu_and_mul = staticmethod(pointwise.gelu_and_mul)
    multiply_by_sigmoid = staticmethod(pointwise.multiply_by_sigmoid)
    small_linear = staticmethod(pointwise.small_linear)
    sample = staticmethod(sampler.sample)
    token_logprobs = staticmethod(sampler.token_logprobs)

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.memory = WeightMemory()

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.memory.empty(shape, dtype or self.dtype)

    def checked_marker(self) -> Path:
        """Return the path of an empty file that says that these kernels are right."""
        return marker(self.dtype).with_suffix(f".{type(self).__name__}")

    def is_checked(self) -> bool:
        return self.checked_marker().exists()

    def set_checked(self) -> None:
        self.checked_marker().touch()

    def quantized(self, weights: str) -> Backend:
        backends = {"int8": CpuInt8Backend, "int4": CpuInt4Backend}
        return backends[weights](self.device, self.dtype)

    def make_weight(self, outputs: int, inputs: int, names: list[str]) -> Any:
        kind = self.head_class if LM_HEAD in names else self.weight_class
        return kind.empty(self.empty, outputs, inputs, num_experts(names) or 1)

    def expert_mlp(self, gate_up: Linear, down: Linear) -> Any:
        return experts.expert_mlp

    def delta_rule(self) -> Any:
        return delta_rule

    def fuse_layers(self, model: Any, attention: Any) -> FusedLayers | None:
        return delta_layers.fuse_layers(model, attention)

    def fuse_step(self, layers: Any, attention: Any, rows: Any) -> Any:
        if type(layers) is FusedLayers:
            return FusedStep(layers, attention, rows)
        return super().fuse_step(layers, attention, rows)

    def step_context(self) -> AbstractContextManager[object]:
        return jit.guard()


class CpuInt8Backend(CpuBackend):
    """The same with the weights of linear layers in int8."""

    weight_class: type[PackedWeight] = int8.PackedInt8
    head_class = int8.PackedInt8


class CpuInt4Backend(CpuInt8Backend):
    """The same with the weights of linear layers in int4."""

    weight_class = int4.PackedInt4
