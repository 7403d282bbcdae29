"""What every attention backend is. It owns the KV cache: its layout, its dtype, its device."""

from typing import Protocol

from torch import Tensor

from nanovllm.runner.batch import ForwardBatch


class AttentionBackend(Protocol):
    """Shapes: T tokens of the step, H query heads, K KV heads, D head size."""

    def prepare(self, batch: ForwardBatch) -> None:
        """Once a step, before any layer: derive what all layers share."""

    def turn_and_store(
        self,
        layer: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The packed projection [T, (H + 2K) D] -> what `attend` takes: q [T, H, D], k, v [T, K, D].

        q and k are normalised per head (where there are weights [D]) and turned by the angles of
        their positions, cos and sin [T, 1, D] (RotaryEmbedding.at); k and v are written to the
        slots of the tokens. What it gives may be `qkv` itself, changed.
        """

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy K and V of blocks, (from, to), in all layers; every read comes before any write."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """Causal attention [T, H, D] of q over each row's whole context, by absolute position.

        q, k and v are what `turn_and_store` gave: a backend may use k and v instead of the cache.
        """
