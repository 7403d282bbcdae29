"""Backend: everything that a device brings, in one value.

The model is written in plain torch. A backend replaces named parts of it by kernels. `PLAIN`
replaces nothing, runs on every device, and is the reference that the tests compare the others with.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from nanovllm.models.attention import PlainAttention
from nanovllm.models.batch import ForwardBatch, SamplingBatch
from nanovllm.models.config import ModelConfig
from nanovllm.models.fp8 import Scales
from nanovllm.models.layers import Linear, Norms, Rope, add_rms_norm, linear, silu_and_mul
from nanovllm.models.logit_rules import token_logprobs
from nanovllm.models.sampler import sample


class Attention(Protocol):
    """Attention with its paged KV cache. T tokens, H query heads, K KV heads, D head size."""

    cache: Tensor

    def prepare(self, batch: ForwardBatch) -> None:
        """Derive what all layers share. Called once per step."""

    def store(self, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Write k and v [T, K, D] to the slots of their tokens."""

    def attend(self, layer: int, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Causal attention of q [T, H, D] over the whole context of each sequence -> [T, H * D]."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target) in all layers. Every read precedes every write."""

    def norm_rope_store(
        self, layer: int, qkv: Tensor, norms: Norms, rope: Rope, batch: ForwardBatch
    ) -> Tensor:
        """One kernel for what Qwen3's attention does between projection and `attend`.

        `qkv` [T, (H + 2K) D] may be overwritten; k and v go to their slots.
        Returns what this attention's `attend` takes: q [T, H, D], or qkv with q first.
        """


@dataclass(frozen=True)
class Backend:
    """Everything that a device brings. loading/select_backend.py selects one."""

    # (shape) -> an uninitialized weight. The runner sets its dtype and device.
    empty: Callable[..., Tensor] = torch.empty
    # (empty, outputs, inputs) -> the weight of a Linear: a tensor, or an object that is loaded and
    # looked up like one.
    make_weight: Callable[[Callable[..., Tensor], int, int], Any] = lambda empty, *shape: empty(
        *shape
    )
    # (x [T, I], Linear) -> [T, O]
    linear: Callable[[Tensor, Linear], Tensor] = linear
    # Changes how a Linear is stored, once it is loaded.
    pack: Callable[[Linear], None] = lambda module: None
    # The fields that replace the plain ones of models/int8.py, if weights are in int8.
    int8: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    # See models/layers.py. Both may overwrite their arguments.
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]] = (
        add_rms_norm
    )
    silu_and_mul: Callable[[Tensor], Tensor] = silu_and_mul
    # (model config, number of blocks with the null block, block size, dtype, device, scales of an
    # fp8 cache or None) -> Attention
    attention: Callable[
        [ModelConfig, int, int, torch.dtype, torch.device, list[Scales] | None], Any
    ] = PlainAttention
    fused_attention: bool = False  # whether attention has `norm_rope_store`, and not `store`
    # logits [R, V] -> token ids [R] int64
    sample: Callable[[Tensor, SamplingBatch], Tensor] = sample
    # See models/logit_rules.py.
    token_logprobs: Callable[[Tensor, Tensor, int], Tensor] = token_logprobs
    # (model, attention) -> an object with the model's `forward` and `logits`, or None.
    compile_layers: Callable[[Any, Any], Any] = lambda model, attention: None
    # (a decode step, memory for the hidden states [N, E] of N rows) -> the step, captured. The step
    # takes rows [S] and returns hidden states [S, E] and tokens [S]; see gpu/graphs.py.
    capture_decode: Callable[[Callable[[Tensor], tuple[Tensor, Tensor]], Tensor], Any] | None = None
    guard: Callable[[], AbstractContextManager[object]] = nullcontext  # held while a step runs
    # Called before each layer of a step, unless all layers are one call. The runner sets it.
    before_layer: Callable[[], None] = lambda: None


PLAIN = Backend()
