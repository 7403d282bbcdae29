"""What every attention backend is. It owns the KV cache: its layout, its dtype, its device."""

from typing import Protocol

from torch import Tensor

from nanovllm.runner.batch import ForwardBatch


class AttentionBackend(Protocol):
    """Shapes: T tokens of the step, H query heads, K KV heads, D head size."""

    def prepare(self, batch: ForwardBatch) -> None:
        """Once a step, before any layer: derive what all layers share."""

    def store(self, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Write k and v [T, K, D] to the slots of the step's tokens."""

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy K and V of blocks, (from, to), in all layers; every read comes before any write."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """Causal attention [T, H, D] of q over each row's whole context, by absolute position.

        k and v are what `store` was just given: a backend may use them instead of reading back.
        """
