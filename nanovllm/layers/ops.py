"""Ops: the functions between the matrix products, which kernels do in one pass each. Their arguments may be used up.

The model is given a set of them: `PLAIN`, torch functions, or that of its attention backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.norm import add_rms_norm


@dataclass(frozen=True)
class Ops:
    # (x, residual or None, weight, eps) -> (RMSNorm(x + residual) * weight, x + residual)
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]  # (gate, up) side by side -> silu(gate) * up
    # (model, attention backend) -> what has the model's forward and logits, in fewer calls; or None
    compile_layers: Callable[[Any, Any], Any] = lambda model, attention: None


PLAIN = Ops(add_rms_norm, silu_and_mul)
