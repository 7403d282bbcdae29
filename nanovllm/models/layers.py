"""The parts of a transformer layer in plain torch: the reference for every fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.models.weights import CheckpointTensor

if TYPE_CHECKING:
    from nanovllm.models.backend import Backend

Norms: TypeAlias = "tuple[Tensor, Tensor] | None"  # weights [D] of the norms of q and k
Rope: TypeAlias = tuple[Tensor, Tensor]  # cos, sin [T, 1, D] of the step's positions


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm(sum) * weight, sum), both [T, E], of the sum of x and the residual if any."""
    total = x if residual is None else residual + x
    return rms_norm(total, weight, eps), total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) of x [..., E], in float32.

    The product with the weight has the dtype of the weight, which may be float32.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return ((wide * scale).to(weight.dtype) * weight).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): x [T, 2F] = (gate, up) -> silu(gate) * up [T, F]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class Linear:
    """A linear layer y = x W^T + b. Projections of one input (q, k, v; gate, up) share a Linear.

    The backend creates `weight`, and may change its layout after it is loaded.
    """

    def __init__(
        self, inputs: int, projections: dict[str, int], backend: Backend, bias: bool = False
    ) -> None:
        """`projections` maps names in a checkpoint to numbers of outputs."""
        outputs = sum(projections.values())
        self.projections, self.backend = projections, backend
        self.weight = backend.make_weight(outputs, inputs, [*projections])  # [O, I]
        self.bias = backend.empty(outputs) if bias else None
        # Adds the results of all ranks; see features/parallel/ranks.py.
        self.reduce: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, I] to [T, O]."""
        y = self.backend.linear(x, self)
        return y if self.reduce is None else self.reduce(y)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that hold the weights."""
        weight = [self.weight] if isinstance(self.weight, Tensor) else self.weight.tensors()
        return weight if self.bias is None else [*weight, self.bias]

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if fused is not None:
                views = fused.split(list(self.projections.values()))
                for name, view in zip(self.projections, views, strict=True):
                    yield CheckpointTensor.of(f"{prefix}{name}.{kind}", view)


def linear(x: Tensor, module: Linear) -> Tensor:
    """Map x [T, I] to [T, O]."""
    return F.linear(x, module.weight, module.bias)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate halves (a, b) of x [T, heads, D] to (a cos - b sin, b cos + a sin). sin is signed."""
    cos, sin = rope
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin
