"""The sizes of captured steps with chunks. test_dry_run.py runs the graphs."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.backends.gpu.attention import SHARED_TOKENS
from nanovllm.backends.gpu.chunk_graphs import ChunkGraphs, token_sizes
from nanovllm.backends.gpu.graphs import capture_sizes


@pytest.mark.parametrize("maximum", [1, 16, 48, 200, 512, 8192])
def test_token_sizes(maximum: int) -> None:
    sizes = token_sizes(maximum)
    assert sizes == sorted({*sizes})
    assert sizes[-1] == min(maximum, SHARED_TOKENS)
    for num in range(1, sizes[-1] + 1):  # padding stays a small share
        size = next(size for size in sizes if size >= num)
        assert size - num < max(16, num / 4), (num, size)


@pytest.mark.parametrize("num", [0, 3])
@pytest.mark.parametrize("error", [None, RuntimeError("unsupported")])
def test_some_sizes_can_be_captured(num: int, error: Exception | None, monkeypatch, caplog) -> None:
    """The largest are captured, until the memory is nearly full or a capture fails."""
    free = itertools.chain([1 << 30] * num, itertools.repeat(1 << 30 if error else 1 << 20))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 80 << 30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    captured: list[int] = []

    def capture(size: int) -> int:
        if len(captured) == num and error:
            raise error
        captured.append(size)
        return size

    found = capture_sizes("chunks", token_sizes(100), torch.device("cuda", 0), int, capture)
    assert [*found] == token_sizes(100)[::-1][:num]
    (record,) = caplog.records
    assert f"for {num} of 7 sizes" in record.getMessage()
    assert ("unsupported" if error else "nearly full") in record.getMessage()


def test_steps_larger_than_all_graphs_are_eager(monkeypatch) -> None:
    monkeypatch.setattr(ChunkGraphs, "_capture", lambda self, size, attention: size)
    model: Any = SimpleNamespace(logits=None, forward=lambda *args: "eager")
    attention: Any = SimpleNamespace(cache=torch.empty(0))
    decodes: Any = SimpleNamespace(capture=None, min_over_ranks=int)
    graphs = ChunkGraphs(model, attention, decodes, max_tokens=100)
    batch: Any = SimpleNamespace(input_ids=range(101), num_decodes=0, context_lens=[1])
    assert graphs.forward(batch, attention) == "eager"
