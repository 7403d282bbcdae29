"""The options of an engine: other names, and values that are refused."""

from pathlib import Path

import pytest
import torch
from checkpoints import random_llm

from nanovllm import LLM
from nanovllm.config import RENAMED, WITHOUT_EFFECT, EngineConfig

OPTIONS = [
    ({"blocksize": 4}, TypeError, "'blocksize'; did you mean 'block_size'"),
    ({"block_size": 4, "kvcache_block_size": 16}, ValueError, "=16 sets block_size, which is 4"),
    ({"max_model_len": 513}, ValueError, "512"),
    ({"kv_cache_memory_bytes": 10**6}, ValueError, "num_kv_cache_blocks=64 and kv_.*; give one of"),
    (
        {"kv_cache_memory_bytes": 100, "num_kv_cache_blocks": None},
        ValueError,
        "too little memory for the KV cache",
    ),
    ({"swap_space": 2**-40}, ValueError, "swap_space=.* has no room for one block"),
    ({"swap_space": 10**7}, ValueError, "takes 10,737,418,240,000,000 bytes of host memory"),
    ({"swap_space": 1, "enable_prefix_caching": False}, ValueError, "needs the prefix cache"),
    ({"num_state_slots": 4, "enable_prefix_caching": False}, ValueError, "needs the prefix cache"),
    ({"num_state_slots": 4}, ValueError, "Qwen3ForCausalLM has none; leave it out"),
    ({"swap_space": 1, "kv_offloading_size": 2}, ValueError, "sets swap_space, which is 1 already"),
    ({"device": "tpu"}, ValueError, "tpu"),
    ({"device": "cuda:00"}, ValueError, "device must be"),
    ({"attention_backend": "sdpa", "batch_invariant": True}, ValueError, "True needs kernels, and"),
    ({"tensor_parallel_size": 2}, ValueError, "WORLD_SIZE is 1; .* torchrun --nproc-per-node 2 "),
    ({"tokenizer": ""}, ValueError, "^tokenizer is empty; give a directory or a hub id"),
    ({"adapter": ""}, ValueError, "^adapter is empty; give a directory or a hub id"),
    ({"skip_tokenizer_init": False}, ValueError, "skip_tokenizer_init=True"),  # it has none
    ({"trust_remote_code": True}, ValueError, "trust_remote_code=True is not supported; .*=False"),
    ({"speculative_config": "ngram"}, TypeError, "speculative_config must be a dict, not 'ngram'"),
    (
        {"speculative_config": {"prompt_lookup": 2}},
        ValueError,
        "unknown field of speculative_config 'prompt_lookup'; did you mean 'prompt_lookup_m",
    ),
    (
        {"speculative_config": {"num_speculative_tokens": 0}},
        ValueError,
        "num_speculative_tokens must be between 1 and 64, not 0",
    ),
    (
        {"speculative_config": {"prompt_lookup_min": 5}},
        ValueError,
        "prompt_lookup_min=5 must be at most prompt_lookup_max=4",
    ),
    ({"lora_dtype": "auto"}, TypeError, "unknown option .*; known: model, device, dtype"),
]


@pytest.mark.parametrize(("options", "error", "word"), OPTIONS, ids=str)
def test_options(path: Path, options: dict, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        random_llm(path, **options)


def test_other_names() -> None:
    for options in ({"kvcache_block_size": 4}, {"block_size": 4, "kvcache_block_size": 4}):
        assert EngineConfig.from_options(options) == EngineConfig(block_size=4)
    assert EngineConfig.from_options({"num_kvcache_blocks": 9}) == EngineConfig(
        num_kv_cache_blocks=9
    )
    assert EngineConfig.from_options({"num_gpu_blocks_override": 9}) == EngineConfig(
        num_kv_cache_blocks=9
    )
    assert EngineConfig.from_options({"kv_offloading_size": 2.5}) == EngineConfig(swap_space=2.5)
    options = {"kvcache_block_size": 4, "block_size": None}
    assert EngineConfig.from_options(options).block_size == 4
    assert options == {"kvcache_block_size": 4, "block_size": None}
    for other, name in RENAMED.items():
        assert name in EngineConfig.__dataclass_fields__
        assert other not in EngineConfig.__dataclass_fields__


def test_none_is_the_default_of_every_option() -> None:
    """As in vLLM, whose defaults are None for some of them."""
    names = [*EngineConfig.__dataclass_fields__, *RENAMED, *WITHOUT_EFFECT]
    assert EngineConfig.from_options(dict.fromkeys(names[1:])) == EngineConfig()
    with pytest.raises(TypeError, match="model must be a directory or a name, not None"):
        LLM(None)  # as in LLM(os.environ.get("MODEL"))
    with pytest.raises(TypeError, match="'max_num_seq'; did you mean 'max_num_seqs'"):
        EngineConfig.from_options({"max_num_seq": None})


def test_options_that_say_what_happens_anyway() -> None:
    for name, values in WITHOUT_EFFECT.items():
        for value in values:
            assert EngineConfig.from_options({name: value}) == EngineConfig()
        with pytest.raises(ValueError, match=f"{name}='other' is not supported"):
            EngineConfig.from_options({name: "other"})
    assert not WITHOUT_EFFECT.keys() & EngineConfig.__dataclass_fields__.keys()


def test_load_format_safetensors(path: Path) -> None:
    tokens = [
        random_llm(path, load_format=name).generate([5, 6], use_tqdm=False)[0]["token_ids"]
        for name in ("auto", "safetensors")
    ]
    assert tokens[0] == tokens[1]


def test_names_of_dtypes() -> None:
    for dtype in ("half", "float16", torch.half):
        assert EngineConfig(dtype=dtype).dtype == "float16"
    for dtype in ("float", "float32", torch.float):
        assert EngineConfig(dtype=dtype).dtype == "float32"
