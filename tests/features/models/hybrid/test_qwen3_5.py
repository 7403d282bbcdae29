"""Models with linear attention: their numbers are transformers', however a prompt is computed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import check_greedy, edited, prompts_of, random_llm
from hybrid_checkpoints import make_hybrid_checkpoint
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.cli.trace.trace import Trace
from nanovllm.config import EngineConfig
from nanovllm.loading import memory
from nanovllm.loading.checkpoint import Checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("hybrid")
    return path, make_hybrid_checkpoint(path)


@pytest.mark.parametrize("backend", ["sdpa", "numba"])
@pytest.mark.parametrize(
    ("layers", "key_heads", "value_heads", "nested"),
    [
        ("LLLF", 2, 4, False),
        ("FLLFL", 2, 2, True),
        ("LL", 1, 3, False),
        ("FF", 2, 2, False),
    ],
)
def test_equals_transformers(
    tmp_path, backend: str, layers: str, key_heads: int, value_heads: int, nested: bool
) -> None:
    model = make_hybrid_checkpoint(tmp_path, layers, value_heads, key_heads, nested=nested)
    llm = random_llm(tmp_path, attention_backend=backend)
    prompts = prompts_of(1, 2, 3, 4, 20, 64, 70, 130)
    check_greedy(model, llm.generate(prompts, GREEDY, use_tqdm=False))
    # With the prefix cache: all but the last tokens of each prompt come from a snapshot.
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    check_greedy(model, outputs)
    if "L" in layers:
        assert [o.num_cached_tokens for o in outputs] == [0, 0, 0, 0, 16, 48, 64, 128]


ROPES: list[dict[str, Any]] = [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "default", "partial_rotary_factor": 1.0},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rotary_embedding(tmp_path, rope: dict[str, Any]) -> None:
    """Only the rotated part of a head has the scale of yarn. All of a head can be rotated."""
    defaults = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    model = make_hybrid_checkpoint(tmp_path, "FLF", rope_parameters=defaults | rope)
    for backend in ("sdpa", "numba"):
        llm = random_llm(tmp_path, attention_backend=backend)
        outputs = llm.generate(prompts_of(20, 100), GREEDY, use_tqdm=False)
        # transformers' own numbers in float32 differ from those in float64 by 1e-4 here.
        check_greedy(model, outputs, tolerance=3e-4)


@pytest.mark.parametrize("step", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_every_split_of_a_prompt(checkpoint: tuple[Path, torch.nn.Module], step: int) -> None:
    """Chunks of 1 to 130 tokens give the numbers of the whole prompt."""
    path, model = checkpoint
    [prompt] = prompts_of(130)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    with torch.no_grad():
        logits = model(torch.tensor([prompt["prompt_token_ids"]]), use_cache=False).logits[0]
    ids = prompt["prompt_token_ids"]
    expected = logits.log_softmax(-1)[range(129), ids[1:]]
    for budget in range(1, 131, step):
        llm = random_llm(path, max_num_batched_tokens=budget, max_num_seqs=1)
        [output] = llm.generate([prompt], params, use_tqdm=False)
        ours = [
            entry[token].logprob
            for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
        torch.testing.assert_close(torch.tensor(ours), expected, atol=1e-4, rtol=0)
        assert output.outputs[0].token_ids[0] == int(logits[-1].argmax())


VARIANTS: list[dict[str, object]] = [
    {"num_kv_cache_blocks": 14, "max_num_seqs": 6},  # preempts
    {"num_kv_cache_blocks": 14, "max_num_seqs": 6, "num_state_slots": 0},
    {"num_kv_cache_blocks": 14, "enable_prefix_caching": False},
    {"max_num_batched_tokens": 13, "async_scheduling": True},
    {"num_kv_cache_blocks": 14, "async_scheduling": True, "num_state_slots": 3},
    {"block_size": 4, "num_kv_cache_blocks": 60, "num_state_slots": 2},
    {"attention_backend": "numba", "num_kv_cache_blocks": 14},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_preemption_chunks_and_overlap(
    checkpoint: tuple[Path, torch.nn.Module], options: dict[str, object]
) -> None:
    path, model = checkpoint
    llm = random_llm(path, **options)
    shared = prompts_of(40, seed=5)[0]["prompt_token_ids"]
    prompts = [{"prompt_token_ids": shared + p["prompt_token_ids"]} for p in prompts_of(3, 9, 30)]
    prompts += prompts_of(1, 17, 33, 60)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    for _ in range(2):
        check_greedy(model, llm.generate(prompts, params, use_tqdm=False))
    if options.get("num_kv_cache_blocks") == 14:
        assert llm.stats()["preemptions"]


def test_several_samples(checkpoint: tuple[Path, torch.nn.Module]) -> None:
    path, model = checkpoint
    llm = random_llm(path)
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, n=3, logprobs=1)
    prompts = prompts_of(1, 2, 16, 17, 30)
    check_greedy(model, llm.generate(prompts, greedy, use_tqdm=False))


def test_a_common_prefix_is_computed_twice(checkpoint: tuple[Path, torch.nn.Module]) -> None:
    """The third request with a common prefix of 64 tokens computes its own tokens only."""
    path, _ = checkpoint
    prefix = prompts_of(64)[0]["prompt_token_ids"]
    tails = [p["prompt_token_ids"] for p in prompts_of(20, 21, 22, 23, seed=7)]

    def cached(llm: LLM, prompts: list[list[int]]) -> list[int]:
        outputs = [
            llm.generate([{"prompt_token_ids": p}], GREEDY, use_tqdm=False)[0] for p in prompts
        ]
        return [output.num_cached_tokens for output in outputs]

    assert cached(random_llm(path), [prefix + tail for tail in tails]) == [0, 0, 64, 64]
    assert cached(random_llm(path), [prefix, prefix + tails[0], prefix + tails[1]]) == [0, 64, 64]
    # The next turn of a chat begins at the last full block of the answer.
    llm = random_llm(path)
    [first] = llm.generate([{"prompt_token_ids": prefix}], GREEDY, use_tqdm=False)
    turn = prefix + list(first.outputs[0].token_ids) + tails[0]
    assert cached(llm, [turn, turn]) == [64, 80]
    stats = llm.stats()
    assert stats["state_hits"] == 2
    assert stats["state_snapshots"] == stats["state_saves"] - stats["state_evictions"] == 4


def test_the_trace_shows_states(checkpoint: tuple[Path, torch.nn.Module]) -> None:
    llm = random_llm(checkpoint[0])
    [prompt] = prompts_of(40)
    with Trace(llm.engine) as trace:
        llm.generate([prompt], GREEDY, use_tqdm=False)
        llm.generate([prompt], GREEDY, use_tqdm=False)
    text = " ".join(str(trace).split())
    assert "Snapshot: the state of request 0 after 32 tokens is saved in slot 257." in text
    assert "Snapshot: the state of request 0 after 48 tokens is saved in slot 258." in text
    assert "State: request 1 begins with a copy of state 257." in text


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_sequence_repeats_at_most_a_block(
    checkpoint: tuple[Path, torch.nn.Module], overlap: bool
) -> None:
    path, model = checkpoint
    llm = random_llm(path, async_scheduling=overlap)
    request = llm.engine.submit(prompts_of(40)[0], replace(GREEDY, max_tokens=90))
    scheduler, preempted = llm.engine.scheduler, 0
    while scheduler.has_work():
        llm.engine.run_step()
        if scheduler.running and len(request.seqs[0].token_ids) % 7 == 0:
            before = scheduler.recomputed_tokens
            scheduler.preempt(scheduler.running[0])
            preempted += 1
            llm.engine.run_step()
            llm.engine.run_step()
            assert scheduler.recomputed_tokens - before <= 16 + overlap
    assert preempted > 8
    check_greedy(model, [request.output])


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8"},
        {"quantization": "int8"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "attention_backend": "numba"},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_other_dtypes_are_near(
    checkpoint: tuple[Path, torch.nn.Module], options: dict[str, object]
) -> None:
    path, model = checkpoint
    llm = random_llm(path, **options)
    prompts = prompts_of(20, 90)
    [*outputs] = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=1)
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = prompt["prompt_token_ids"]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        expected = logprobs[range(len(ids) - 1), ids[1:]]
        ours = [
            entry[token].logprob
            for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
        error = (torch.tensor(ours) - expected).abs().mean()
        assert error < (0.5 if options.get("quantization") else 0.2), error


BAD_CONFIGS = {
    "layer_types must have 4 .* with 'mamba'": {"layer_types": ["mamba"] * 4},
    "layer_types must have 4 .* has 2": {"layer_types": ["linear_attention"] * 2},
    "linear_conv_kernel_dim 3 is not supported; only 4": {"linear_conv_kernel_dim": 3},
    "linear_key_head_dim 6 is no multiple of 4": {"linear_key_head_dim": 6},
    "no 'linear_num_value_heads'": {"linear_num_value_heads": None},
    "full_attention_interval": {"layer_types": None, "full_attention_interval": 0},
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_bad_configs(checkpoint: tuple[Path, torch.nn.Module], tmp_path, message: str) -> None:
    path = edited(checkpoint[0], tmp_path, **BAD_CONFIGS[message])
    with pytest.raises(ValueError, match=message):
        random_llm(path)


def test_repeated_prefixes_of_names(tmp_path) -> None:
    """transformers 5.3 to 5.5 wrote "language_model." several times."""
    make_hybrid_checkpoint(tmp_path, nested=True)
    wanted = random_llm(tmp_path).generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "language_model."
    tensors = {name.replace(prefix, prefix * 3): x for name, x in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    found = random_llm(tmp_path).generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert found[0]["token_ids"] == wanted[0]["token_ids"]


@pytest.mark.parametrize(
    "option", [{"swap_space": 1}, {"tensor_parallel_size": 2}, {"speculative_config": {}}]
)
def test_refused_options(checkpoint: tuple[Path, torch.nn.Module], option: dict[str, Any]) -> None:
    model_config = Checkpoint(checkpoint[0]).model_config
    with pytest.raises(ValueError, match=f"does not support {next(iter(option))}"):
        model_config.check_options(EngineConfig(**option))


def test_the_size_option_bounds_cache_and_states(checkpoint: tuple[Path, torch.nn.Module]) -> None:
    """As in vLLM. Half is for states, so that fewer sequences run at a time."""
    for size in (2**20, 2**21):
        options = dict(num_kv_cache_blocks=None, kv_cache_memory_bytes=size)
        runner = random_llm(checkpoint[0], **options).engine.runner
        used = runner.attention.cache.nbytes + runner.states.nbytes
        block = runner.model.config.block_bytes(16, 4)
        assert size - block < used <= size
        assert runner.states.nbytes <= size // 2
    one_state = runner.states.nbytes // len(runner.states.rule[0])
    options["kv_cache_memory_bytes"] = 2 * one_state + 1
    with pytest.raises(
        ValueError, match="too little memory .* null block .* raise kv_cache_memory_bytes"
    ):
        random_llm(checkpoint[0], **options)
    with pytest.raises(ValueError, match="num_state_slots=999 take .* lower num_state_slots"):
        random_llm(checkpoint[0], num_state_slots=999, **options)


@pytest.mark.parametrize("mib", [24, 3 * 1024])
def test_cache_and_states_of_a_small_memory(
    mib: int, checkpoint: tuple[Path, torch.nn.Module], monkeypatch
) -> None:
    """Together they take half of the free memory, of which states take at most half."""
    monkeypatch.setattr(memory, "available_host_memory", lambda: mib << 20)
    runner = random_llm(checkpoint[0], num_kv_cache_blocks=None).engine.runner
    needed = 256 * 512 // 16 + 1  # blocks for all rows
    block = runner.model.config.block_bytes(16, 4)
    if mib > 1024:
        assert runner.attention.cache.nbytes == needed * block
        return
    half = (mib << 20) // 2
    assert runner.states.nbytes <= half // 2
    assert 0.9 * half < runner.attention.cache.nbytes + runner.states.nbytes <= half


def test_a_step_reads_no_other_tensors(tmp_path) -> None:
    """Tensors for images and MTP are ignored, and eos_token_id is read from text_config."""
    make_hybrid_checkpoint(tmp_path, nested=True, eos_token_id=5)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "eos_token_id" not in raw
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.generation_defaults()[0] == {5}
    with checkpoint.open_weights() as files:
        names = {name for file in files.values() for name in file.keys()}  # noqa: SIM118
    assert not any("visual" in name or "mtp" in name for name in names)
