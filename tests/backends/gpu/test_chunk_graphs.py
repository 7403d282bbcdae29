"""The sizes of captured steps with chunks. test_dry_run.py runs the graphs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.backends.gpu.attention import SHARED_TOKENS
from nanovllm.backends.gpu.chunk_graphs import ChunkGraphs, token_sizes


@pytest.mark.parametrize("maximum", [1, 16, 48, 200, 512, 8192])
def test_token_sizes(maximum: int) -> None:
    sizes = token_sizes(maximum)
    assert sizes == sorted({*sizes})
    assert sizes[-1] == min(maximum, SHARED_TOKENS)
    for num in range(1, sizes[-1] + 1):  # padding stays a small share
        size = next(size for size in sizes if size >= num)
        assert size - num < max(16, num / 4), (num, size)


@pytest.mark.parametrize("num", [0, 3])
def test_memory_that_holds_some_graphs(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest sizes are captured, and the model computes steps that are larger than all."""
    free = iter([1 << 30] * num + [1 << 20])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 80 << 30))
    monkeypatch.setattr(ChunkGraphs, "_capture", lambda self, size, attention: size)
    model: Any = SimpleNamespace(logits=None, forward=lambda *args: "eager")
    attention: Any = SimpleNamespace(cache=torch.empty(0))
    graphs = ChunkGraphs(model, attention, capture=None, max_tokens=100)  # type: ignore[arg-type]
    assert sorted(graphs.steps) == token_sizes(100)[len(token_sizes(100)) - num :]
    batch: Any = SimpleNamespace(
        input_ids=range(101 if num else 1), num_decodes=0, context_lens=[1]
    )
    assert graphs.forward(batch, attention) == "eager"
