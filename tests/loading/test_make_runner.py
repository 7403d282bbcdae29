"""Sizes that cannot be allocated are refused before the weights are loaded."""

from pathlib import Path

import pytest
import torch
from checkpoints import random_llm

from nanovllm.loading import make_runner as start

SIZES = [
    ({"max_num_seqs": 65_536}, "max_num_seqs must be between 1 and 65535"),
    ({"max_num_seqs": 10**20}, "max_num_seqs must be between 1 and 65535"),
    ({"block_size": 10**12}, "block_size must be between 1 and 1048576"),
    ({"block_size": 2**20, "num_kv_cache_blocks": 10**5}, "lower .*block_size"),
    ({"num_kv_cache_blocks": 10**9}, r"a KV cache of [\d,]+ bytes .* lower num_kv_cache_blocks"),
    ({"num_kv_cache_blocks": 10**20}, r"a KV cache of [\d,]+ bytes .* lower num_kv_cache_blocks"),
    ({"num_kv_cache_blocks": None, "kv_cache_memory_bytes": 10**25}, "lower .*_memory_bytes"),
    ({"device": "cuda:99999999999999999999"}, "device must be"),
]


@pytest.mark.parametrize(("options", "word"), SIZES, ids=str)
def test_sizes_that_cannot_be_allocated(
    path: Path, monkeypatch: pytest.MonkeyPatch, options: dict, word: str
) -> None:
    """Refused before the weights are loaded."""
    monkeypatch.setattr(start, "load_model", None)
    with pytest.raises(ValueError, match=word):
        random_llm(path, **options)


@pytest.mark.parametrize("part", ["Rows", "load_model"])
def test_other_parts_that_cannot_be_allocated(
    path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory") if part == "Rows" else MemoryError

    monkeypatch.setattr(start, part, fail)
    with pytest.raises(ValueError, match="out of memory; lower max_num_seqs, max_model_len or"):
        random_llm(path)
