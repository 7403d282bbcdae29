"""Backend: the parts of a model that a device may replace with kernels.

`Backend` itself is plain torch and runs on every device. Tests compare all other backends with it.
backends/gpu/backend.py and backends/cpu/backend.py extend it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.models import layers, sampler
from nanovllm.models.attention import PlainAttention
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.layers import Linear

if TYPE_CHECKING:
    from nanovllm.backends.gpu.graphs import DecodeGraphs
    from nanovllm.config import EngineConfig
    from nanovllm.models.model_config import ModelConfig
    from nanovllm.models.qwen3 import Qwen3
    from nanovllm.plan import StepPlan
    from nanovllm.runner.rows import Rows


class FusedModel(Protocol):
    """The model, or an object that computes the same in fewer calls."""

    def forward(self, batch: ForwardBatch, attention: Any) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def num_experts(names: Iterable[str]) -> int:
    """Return the number of experts that the projections of a Linear belong to, or 0."""
    return len({name.split(".")[1] for name in names if name.startswith("experts.")})


class Backend:
    """The backend in plain torch, for any device. loading/select_backend.py selects a backend."""

    attention_class: type[PlainAttention] = PlainAttention
    captures = False  # whether `capture_decode` is implemented

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype` is the dtype of the model."""
        self.device, self.dtype = device, dtype
        # Entered for each step and for loading weights. Before each layer and each tensor,
        # `before_layer` is called.
        self.thread_limit: Callable[[], AbstractContextManager[object]] = nullcontext
        self.before_layer: Callable[[], None] = lambda: None

    def quantized(self, weights: str) -> Backend:
        """Return this backend with linear layers in "int8" or "int4"; see backends/int8.py."""
        raise NotImplementedError

    def batch_invariant(self, config: EngineConfig, model: ModelConfig) -> Backend:
        """Return the backend for batch_invariant=True. The kernels of a CPU need no other one.

        Raises ValueError if results depend on what else a step computes.
        """
        return self

    def is_checked(self) -> bool:
        """Return whether there are no kernels, or an earlier process has found them right."""
        return True

    def set_checked(self) -> None:
        """Remember for later processes that the kernels are right."""

    def replace_kernel(self, name: str, plain: Backend) -> bool:
        """Compute the kernel `name` of features/kernel_check/at_start.py as `plain` does.

        Returns False if no single kernel can be replaced.
        """
        return False

    # ---- weights ----

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialized weight."""
        # dtype and device are arguments, because torch's defaults also apply to other threads.
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def make_weight(self, outputs: int, inputs: int, names: list[str]) -> Any:
        """Return the weight of a Linear: a tensor [O, I], or an object like Int8Weight.

        Such an object has `shape`, `nbytes`, `split`, `copy_` and indexing by rows. `names` are the
        names of the projections of the Linear, such as "lm_head".
        """
        return self.empty(outputs, inputs)

    # ---- layers, as in models/layers.py; x and the residual may be overwritten ----

    linear = staticmethod(layers.linear)
    add_rms_norm = staticmethod(layers.add_rms_norm)
    silu_and_mul = staticmethod(layers.silu_and_mul)
    # x [T, I] times a small weight [O, I] that is not in a Linear, such as a router's.
    small_linear: Callable[[Tensor, Tensor], Tensor] = staticmethod(F.linear)

    @staticmethod
    def gelu_and_mul(x: Tensor) -> Tensor:
        """As silu_and_mul with GELU (arXiv:1606.08415), by tanh, in place of silu."""
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    @staticmethod
    def multiply_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
        """Return x * sigmoid(gate), where x is [T, n] and gate is [T, n] or [T, 1]."""
        return x * gate.sigmoid()

    def delta_rule(self) -> ModuleType | None:
        """Return a module of kernels for features/models/hybrid/delta_rule.py, or None.

        It has `decode`, and maybe `chunk`.
        """
        return None

    def experts(self, module: Linear) -> ModuleType | None:
        """Return a module with the function `expert_linear` of features/models/moe/experts.py.

        `module` is a Linear with the weights of all experts.
        """
        return None

    def expert_mlp(self, gate_up: Linear, down: Linear) -> Callable[..., Tensor] | None:
        """Return a faster `expert_mlp` of features/models/moe/experts.py, or None."""
        return None

    # ---- results, as in models/sampler.py ----

    sample = staticmethod(sampler.sample)
    token_logprobs = staticmethod(sampler.token_logprobs)

    # ---- steps ----

    def fuse_layers(self, model: Qwen3, attention: Any) -> FusedModel | None:
        """Return a faster object that computes the same as `model`, or None."""
        return None

    def fuse_step(
        self, layers: FusedModel, attention: Any, rows: Rows
    ) -> Callable[[StepPlan], np.ndarray | None]:
        """Return a function that samples the tokens [R] of a step, or returns None if it cannot.

        `layers` is the result of `fuse_layers`.
        """
        return lambda plan: None

    def capture_decode(
        self,
        decode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        positions: np.ndarray,
        min_over_ranks: Callable[[int], int],
    ) -> DecodeGraphs:
        """Capture a decode step for as many sizes as possible; see DecodeGraphs."""
        raise NotImplementedError

    def capture_chunks(
        self, model: Qwen3, attention: Any, graphs: DecodeGraphs, max_tokens: int
    ) -> FusedModel | None:
        """Return an object like the result of `fuse_layers` that is faster for chunks, or None.

        `graphs` were returned by `capture_decode`. A step has at most `max_tokens` tokens.
        """
        return None

    def step_context(self) -> AbstractContextManager[object]:
        """Return a context manager to enter for each step."""
        # Triton launches kernels on the current device of the thread.
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def check_capability(
    device: torch.device, minimum: tuple[int, int], needs: str, instead: str
) -> None:
    """Raise ValueError if the device is an NVIDIA GPU with a compute capability below `minimum`.

    The message begins with `needs` and ends with `instead`.
    """
    if device.type == "cuda" and not torch.version.hip:
        capability = torch.cuda.get_device_capability(device)
        if capability < minimum:
            needed, available = (".".join(map(str, pair)) for pair in (minimum, capability))
            raise ValueError(
                f"{needs} compute capability {needed} or higher, and "
                f"{torch.cuda.get_device_name(device)} has {available}; {instead}"
            )
