"""What every attention backend is. It owns the KV cache: its layout, its dtype, its device."""

from typing import Protocol

from torch import Tensor

from nanovllm.runner.batch import ForwardBatch


class AttentionBackend(Protocol):
    """Shapes: T tokens of the step, H query heads, K KV heads, D head size."""

    def prepare(self, batch: ForwardBatch) -> None:
        """Once a step, before any layer: derive what all layers share."""

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        """The packed projection [T, (H + 2K) D] -> causal attention [T, H * D].

        q and k are normalised per head (where there are weights [D]) and turned by the angles of
        their positions, cos and sin [T, 1, D] (RotaryEmbedding.at). All k and v are written to the
        slots of their tokens, and only then do the queries look: each over its sequence's whole
        context up to itself, by absolute position. `qkv` is used up.
        """

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy K and V of blocks, (from, to), in all layers; every read comes before any write."""
