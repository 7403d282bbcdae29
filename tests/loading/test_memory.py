"""What the engine reserves: the longest request that fits, and the memory of logit rules."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_llm

from nanovllm import SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.loading import memory

POSITIONS = 512


def test_requests_as_long_as_the_memory_of_a_cpu(path: Path, monkeypatch, caplog) -> None:
    """A request without max_tokens ends there; before, it was refused."""
    caplog.set_level(logging.INFO, "nanovllm")
    whole = random_llm(path, num_kv_cache_blocks=None)
    assert whole.engine.input_processor.max_model_len == POSITIONS
    assert "max_model_len" not in caplog.text
    cache = whole.engine.runner.attention.cache
    block_bytes = cache.nbytes // (whole.engine.runner.num_blocks + 1)
    monkeypatch.setattr(memory, "CPU_CACHE_BYTES", 7 * block_bytes)
    llm = random_llm(path, num_kv_cache_blocks=None)
    assert llm.engine.input_processor.max_model_len == 6 * 16
    assert "KV cache of 96 tokens" in caplog.text
    assert f"which limits max_model_len to 96 of the model's {POSITIONS}" in caplog.text
    # What was made before the cache is for 6 blocks, and not for all positions.
    assert llm.engine.runner.rows.block_tables.shape[1] == 6
    assert llm.engine.runner.model.rotary.max_len == 6 * 16
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 93
    assert output.outputs[0].finish_reason == "length"


def test_requests_as_long_as_the_requested_cache(path: Path) -> None:
    """An option that the user has set is kept, or it is an error."""
    runner = random_llm(path, num_kv_cache_blocks=6).engine.runner
    block = runner.model.config.block_bytes(16, runner.dtype.itemsize)
    by_bytes = {"num_kv_cache_blocks": None, "kv_cache_memory_bytes": 7 * block}
    for options in ({"num_kv_cache_blocks": 6}, by_bytes):
        for length, limit in ((None, 96), (80, 80), (96, 96)):
            llm = random_llm(path, max_model_len=length, **options)
            assert llm.engine.input_processor.max_model_len == limit
            assert llm.engine.runner.rows.block_tables.shape[1] == limit // 16
    # Without max_tokens, a request ends where the cache does.
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    (output,) = random_llm(path, **by_bytes).generate([[1, 2, 3]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 93


def test_max_model_len_of_more_tokens_than_the_cache(path: Path, monkeypatch) -> None:
    """The message names what to change, and that works."""
    whole = random_llm(path).engine.runner
    block = whole.model.config.block_bytes(16, whole.dtype.itemsize)
    monkeypatch.setattr(memory, "CPU_CACHE_BYTES", 7 * block)
    for option, value, more in (
        ("num_kv_cache_blocks", 6, 7),
        ("kv_cache_memory_bytes", 7 * block, 8 * block),
        ("kv_cache_memory_bytes", None, 8 * block),  # sized by the free memory
    ):
        wanted = f"max_model_len=97 is more than the .* {option} to {more:,}, or"
        options = {"num_kv_cache_blocks": None, "max_model_len": 97} | {option: value}
        with pytest.raises(ValueError, match=wanted):
            random_llm(path, **options)
        random_llm(path, **(options | {option: more}))


def blocks_of_a_gpu(monkeypatch: pytest.MonkeyPatch, room: int, **options: int) -> int:
    """The number of blocks of 10 bytes that a GPU with `room` bytes gets; 40,960 positions."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * gib, 4 * gib))
    config = EngineConfig(gpu_memory_utilization=1.0, **options)
    length = config.max_model_len or 40_960
    budget = memory.MemoryBudget(config, torch.device("cuda", 0), 4 * gib, gib, 10)
    scratch = 3 * gib - memory.CUDA_MARGIN - room
    num = budget.num_kv_blocks(length, 3 * gib, scratch)
    assert budget.fitted_length(length, num) == min(length, num * 16)
    return num


def test_requests_as_long_as_the_memory_of_a_gpu(monkeypatch) -> None:
    assert blocks_of_a_gpu(monkeypatch, 25_610) == 2560  # all positions, and the null block
    assert blocks_of_a_gpu(monkeypatch, 25_600) == 2559
    assert blocks_of_a_gpu(monkeypatch, 20) == 1
    assert blocks_of_a_gpu(monkeypatch, 25_610, max_model_len=40_960) == 2560
    with pytest.raises(ValueError, match="too little memory for the KV cache: it may"):
        blocks_of_a_gpu(monkeypatch, 19)
    with pytest.raises(ValueError, match="too little memory for the KV cache: it may"):
        blocks_of_a_gpu(monkeypatch, 29, block_size=1)
    with pytest.raises(ValueError, match="max_model_len=40,960 is more than the 40,944 tokens"):
        blocks_of_a_gpu(monkeypatch, 25_600, max_model_len=40_960)


def test_logit_rules_take_memory_when_requests_use_them(path: Path) -> None:
    """Penalties take it when a row has some for the first time."""
    llm = random_llm(path)
    params = SamplingParams(max_tokens=5)
    llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert llm.engine.runner.rows.rules is None
    llm.generate([[1, 2, 3]], replace(params, logprobs=2), use_tqdm=False)
    rules = llm.engine.runner.rows.rules
    assert rules.logits is None
    llm.generate([[1, 2, 3]] * 2, replace(params, logit_bias={3: 1.0}), use_tqdm=False)
    assert rules.logits.shape == rules.sizes[::2]
    assert len(rules.penalties.tokens) == 0
    llm.generate([[4]] * 3, replace(params, presence_penalty=1.0), use_tqdm=False)
    assert rules.penalties.tokens.shape == rules.penalties.counts.shape == rules.sizes[:2]


def test_too_little_memory_for_penalties_ends_only_that_request(path: Path, monkeypatch) -> None:
    new_empty = torch.Tensor.new_empty

    def fail(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if x.dtype == torch.int32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return new_empty(x, *args, **options)

    llm = random_llm(path)
    params = SamplingParams(max_tokens=5)
    penalized = replace(params, presence_penalty=1.0)
    monkeypatch.setattr(torch.Tensor, "new_empty", fail)
    with pytest.raises(ValueError, match="out of memory for penalties; lower max_num_seqs or max"):
        llm.generate([[1, 2], [3]], [params, penalized], use_tqdm=False)
    monkeypatch.undo()
    outputs = llm.generate([[1, 2], [3]], [params, penalized], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5]


def test_advice_for_a_cache_that_does_not_fit(path: Path, monkeypatch) -> None:
    """On a CPU it names no option that has an effect on a GPU only."""
    monkeypatch.setattr(memory, "available_host_memory", lambda: 64 << 20)
    with pytest.raises(
        ValueError, match="needs .* for the null block and a request of 2 tokens"
    ) as error:
        random_llm(path, block_size=2**16, num_kv_cache_blocks=None)
    assert "raise kv_cache_memory_bytes, or lower block_size" in str(error.value)
