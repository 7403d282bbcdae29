"""Steps with chunks as CUDA graphs of the operations between two attentions.

The launches of attention depend on the lengths of all sequences. All others depend only on the
number of tokens. So the rest is captured in pieces for each of a few numbers of tokens, as vLLM's
piecewise graphs are, and attention is launched between two replays:

    norm, q k v, rotary | attention of layer 0 | o, norm, MLP, norm, q k v, rotary | attention ...
    `----- piece 0 ----'                        `------------ piece 1 -----------'
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.gpu.attention import SHARED_TOKENS, TritonAttention
from nanovllm.backends.gpu.graphs import CudaCapture, DecodeGraphs, capture_sizes
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.qwen3 import Qwen3


def token_sizes(max_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture: padding is less than 16, or a quarter."""
    sizes = [*range(16, 128, 16), *range(128, 256, 32), *range(256, SHARED_TOKENS + 1, 64)]
    largest = min(max_tokens, SHARED_TOKENS)
    return [size for size in sizes if size < largest] + [largest]


class CutAttention:
    """Attention in a capture: it calls `cut` in place of the launches of attention."""

    def __init__(self, attention: TritonAttention, cut: Callable[[int], None]) -> None:
        self.norm_rope_store = attention.norm_rope_store
        self.cut = cut

    def attend(self, layer: int, q: Tensor, batch: ForwardBatch) -> Tensor:
        self.cut(layer)
        out: Tensor = batch.attention_metadata.out.flatten(1)
        return out


class ChunkGraphs:
    """Takes the place of a model. Steps without chunks and long steps are the model's."""

    def __init__(
        self, model: Qwen3, attention: TritonAttention, graphs: DecodeGraphs, max_tokens: int
    ) -> None:
        self.model = model
        self.logits = model.logits
        # The pool of the decode graphs has memory for these, because one graph runs at a time.
        self.capture = cast(CudaCapture, graphs.capture)
        sizes = token_sizes(max_tokens)
        # [3, tokens] int64: the ids, positions and slots of a step. Padding is in the null block.
        device = attention.cache.device
        self.inputs = torch.zeros((3, sizes[-1]), dtype=torch.int64, device=device)
        # Number of tokens -> replays of the pieces, layers of the attentions, hidden states.
        self.steps: dict[int, tuple[list[Callable[[], None]], list[int], Tensor]] = capture_sizes(
            "chunks",
            sizes,
            device,
            graphs.min_over_ranks,
            lambda size: self._capture(size, attention),
        )

    def _capture(self, size: int, attention: TritonAttention) -> Any:
        ids, positions, slots = self.inputs[:, :size]
        none = self.inputs[0, :0]
        lens = np.zeros(0, np.int64)
        batch = ForwardBatch(ids, positions, slots, none, none, none, query_lens=lens)
        attention.prepare(batch)  # of no sequences: it launches nothing
        self.model.forward(batch, CutAttention(attention, lambda layer: None))  # type: ignore[arg-type]
        torch.cuda.synchronize()
        pieces: list[Callable[[], None]] = []
        layers: list[int] = []
        with ExitStack() as current:

            def begin() -> None:
                pieces.append(current.enter_context(self.capture.graph()).replay)

            def cut(layer: int) -> None:
                layers.append(layer)
                current.close()
                begin()

            begin()
            hidden = self.model.forward(batch, CutAttention(attention, cut))  # type: ignore[arg-type]
        return pieces, layers, hidden

    def forward(self, batch: ForwardBatch, attention: TritonAttention) -> Tensor:
        """Return the hidden states [T, E], as Qwen3.forward. They are valid until the next step."""
        num = len(batch.input_ids)
        if num > max(self.steps, default=0) or batch.num_decodes == len(batch.context_lens):
            return self.model.forward(batch, attention)
        size = next(size for size in sorted(self.steps) if size >= num)
        pieces, layers, hidden = self.steps[size]
        sent = batch.input_ids, batch.positions, batch.slot_mapping
        torch.stack(sent, out=self.inputs[:, :num])
        self.inputs[:, num:size] = 0
        for replay, layer in zip(pieces, layers, strict=False):
            replay()
            attention.attend(layer, batch.attention_metadata.q, batch)
        pieces[-1]()
        return hidden[:num]
