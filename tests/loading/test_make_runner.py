"""Sizes that cannot be allocated are refused before the weights are loaded."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from checkpoints import random_llm

from nanovllm.config import EngineConfig
from nanovllm.features.models.hybrid.hybrid_config import HybridConfig
from nanovllm.loading import make_runner as start
from nanovllm.loading.memory import MemoryBudget
from nanovllm.runner.one_rank import OneRank

SIZES = [
    ({"max_num_seqs": 65_536}, "max_num_seqs must be between 1 and 65535"),
    ({"max_num_seqs": 10**20}, "max_num_seqs must be between 1 and 65535"),
    ({"block_size": 2**16 + 1}, "block_size must be between 1 and 65536, not 65537"),
    ({"block_size": 2**16, "num_kv_cache_blocks": 10**6}, "lower .*block_size"),
    ({"num_kv_cache_blocks": 10**9}, r"a KV cache of [\d,]+ bytes .* lower num_kv_cache_blocks"),
    ({"num_kv_cache_blocks": 10**20}, r"a KV cache of [\d,]+ bytes .* lower num_kv_cache_blocks"),
    ({"num_kv_cache_blocks": None, "kv_cache_memory_bytes": 10**25}, "lower .*_memory_bytes"),
    ({"device": "cuda:99999999999999999999"}, "device must be"),
]


@pytest.mark.parametrize(("options", "word"), SIZES, ids=str)
def test_sizes_that_cannot_be_allocated(path: Path, monkeypatch, options: dict, word: str) -> None:
    monkeypatch.setattr(start, "load_model", load := Mock())
    with pytest.raises(ValueError, match=word):
        random_llm(path, **options)
    load.assert_not_called()


@pytest.mark.parametrize("part", ["Rows", "load_model"])
def test_other_parts_that_cannot_be_allocated(path: Path, monkeypatch, part: str) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory") if part == "Rows" else MemoryError

    monkeypatch.setattr(start, part, fail)
    with pytest.raises(ValueError, match="out of memory; lower max_num_seqs, max_model_len or"):
        random_llm(path)


def test_states_are_counted_once_on_a_gpu(monkeypatch) -> None:
    """They are allocated, so they are no longer free, when the blocks are counted."""
    gib = 2**30
    states = SimpleNamespace(nbytes=gib)
    profile = SimpleNamespace(scratch_bytes=lambda *_: 0)
    monkeypatch.setitem(sys.modules, "nanovllm.backends.gpu.profile", profile)
    monkeypatch.setattr("nanovllm.features.models.hybrid.states.States", lambda *_: states)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7 * gib, 8 * gib))
    backend: Any = SimpleNamespace(
        device=torch.device("cuda", 0), dtype=None, attention_class=lambda *_: None
    )
    model = SimpleNamespace(config=object.__new__(HybridConfig))
    runner: Any = SimpleNamespace(backend=backend, model=model, host_pool=None, states=None)
    runner.ranks = OneRank()
    config = EngineConfig(gpu_memory_utilization=1.0)
    budget = MemoryBudget(config, backend.device, 8 * gib, 0, gib >> 4, state_bytes=gib)
    start.make_cache(runner, budget, 40_960, None)
    assert runner.num_blocks == 7 * 16 - start.memory.CUDA_MARGIN // (gib >> 4) - 1
