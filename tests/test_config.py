"""The options of an engine: other names, and values that are refused."""

from pathlib import Path

import pytest
import torch
from checkpoints import random_llm
from wrong_values import NAN

from nanovllm.config import EngineConfig
from nanovllm.llm import engine_config

OPTIONS = [
    ({"max_num_seq": 4}, TypeError, "'max_num_seqs'"),
    ({"blocksize": 4}, TypeError, "kvcache_block_size"),
    ({"block_size": 4.0}, TypeError, "kvcache_block_size must be an int, not 4.0"),
    ({"block_size": 4, "kvcache_block_size": 16}, ValueError, "=16 are two names of one option"),
    ({"kvcache_block_size": 16, "block_size": 4}, ValueError, "block_size=4 and kvcache_block_s"),
    ({"max_logprobs": -2}, ValueError, "max_logprobs must be at least -1"),
    ({"max_logprobs": 2.0}, TypeError, "max_logprobs must be an int"),
    ({"max_num_seqs": 0}, ValueError, "max_num_seqs"),
    ({"max_num_seqs": 2.0}, TypeError, "max_num_seqs"),
    ({"max_num_batched_tokens": 0}, ValueError, "max_num_batched_tokens"),
    ({"kvcache_block_size": -1}, ValueError, "kvcache_block_size"),
    ({"max_model_len": 513}, ValueError, "512"),
    ({"max_model_len": 0}, ValueError, "max_model_len"),
    ({"num_kvcache_blocks": 0}, ValueError, "num_kvcache_blocks"),
    ({"kv_cache_memory_bytes": 10**6}, ValueError, "num_kvcache_blocks=64 and kv_.*; give one of"),
    (
        {"kv_cache_memory_bytes": 100, "num_kvcache_blocks": None},
        ValueError,
        "no room for one block",
    ),
    (
        {"kv_cache_memory_bytes": 10**16, "num_kvcache_blocks": None},
        ValueError,
        "lower num_kvcache",
    ),
    ({"swap_space": -1}, ValueError, "swap_space must be at least 0, not -1"),
    ({"swap_space": "4GiB"}, TypeError, "swap_space must be a number"),
    ({"swap_space": 2**-40}, ValueError, "swap_space=.* has no room for one block"),
    ({"swap_space": 10**7}, ValueError, "takes 10,737,418,240,000,000 bytes of host memory"),
    ({"swap_space": 1, "enable_prefix_caching": False}, ValueError, "needs the prefix cache"),
    ({"num_state_slots": 4, "enable_prefix_caching": False}, ValueError, "in the prefix cache"),
    ({"num_state_slots": 4}, ValueError, "Qwen3ForCausalLM has none; leave it out"),
    ({"swap_space": 1, "kv_offloading_size": 2}, ValueError, "are two names of one option"),
    ({"kv_offloading_size": True}, TypeError, "swap_space must be a number, not True"),
    ({"kv_offloading_backend": "lmcache"}, ValueError, "kv_offloading_backend='lmcache' is not"),
    ({"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization"),
    ({"gpu_memory_utilization": NAN}, ValueError, "gpu_memory_utilization"),
    ({"gpu_memory_utilization": "all"}, TypeError, "gpu_memory_utilization"),
    ({"device": "tpu"}, ValueError, "tpu"),
    ({"device": "cuda:00"}, ValueError, "device must be"),
    ({"device": "cuda:x"}, ValueError, "cuda:x"),
    ({"dtype": "int8"}, ValueError, "float32"),
    ({"scheduling_policy": "lifo"}, ValueError, "fcfs"),
    ({"attention_backend": "flash"}, ValueError, "sdpa"),
    ({"tensor_parallel_size": 2}, ValueError, "WORLD_SIZE is 1; .* torchrun --nproc-per-node 2 "),
    ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size must be at least 1, not 0"),
    ({"load_format": "pickle"}, ValueError, "dummy"),
    ({"enforce_eager": "yes"}, TypeError, "enforce_eager"),
    ({"async_scheduling": 2}, TypeError, "async_scheduling"),
    ({"seed": None}, TypeError, "seed"),
    ({"tokenizer": 3}, TypeError, "tokenizer"),
    ({"skip_tokenizer_init": False}, ValueError, "skip_tokenizer_init=True"),  # it has none
    ({"trust_remote_code": True}, ValueError, "trust_remote_code=True is not supported: .*never"),
    ({"quantization": "int3"}, ValueError, "must be one of int8, int4, not 'int3'"),
    ({"tensor_parallel_sise": 1}, TypeError, "did you mean 'tensor_parallel_size'"),
    ({"lora_dtype": "auto"}, TypeError, "unknown option .*; known: model, device, dtype"),
]


@pytest.mark.parametrize(("options", "error", "word"), OPTIONS, ids=str)
def test_options(path: Path, options: dict, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        random_llm(path, **options)


def test_block_size_is_another_name() -> None:
    for options in ({"block_size": 4}, {"block_size": 4, "kvcache_block_size": 4}):
        assert engine_config(options) == EngineConfig(kvcache_block_size=4)
    options = {"kvcache_block_size": 4, "block_size": None}
    assert engine_config(options).kvcache_block_size == 4
    assert options.keys() == {"kvcache_block_size", "block_size"}


def test_names_of_dtypes() -> None:
    for dtype in ("half", "float16", torch.half):
        assert EngineConfig(dtype=dtype).dtype == "float16"
    for dtype in ("float", "float32", torch.float):
        assert EngineConfig(dtype=dtype).dtype == "float32"
