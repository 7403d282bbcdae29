"""On the CPU's kernels a request has the same tokens and log-probabilities, to the last bit, alone
and in any company: batches, chunks, prefix hits, shared prefixes, preemption, drafts, threads.
"""

import importlib
import importlib.util
import inspect
import random
import textwrap
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, random_llm
from family_checkpoints import make_family_checkpoint
from hybrid_checkpoints import make_hybrid_checkpoint
from moe_checkpoints import make_moe_checkpoint
from wrong_kernels import IN_ANOTHER_ORDER

from nanovllm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams

numba = pytest.importorskip("numba")
from nanovllm.backends.cpu import jit  # noqa: E402 (it needs Numba)
from nanovllm.backends.cpu.kernels import experts, primitives, product, simd  # noqa: E402

Make = Callable[[Path], Any]
MODELS: dict[str, Make] = {
    "qwen3": make_checkpoint,
    "qwen2": lambda path: make_checkpoint(path, "qwen2", 64),
    "llama": lambda path: make_checkpoint(path, "llama", 80, 1, 3),
    # Neither heads, nor hidden size, nor MLP fill whole blocks and words.
    "odd": lambda path: make_checkpoint(path, "qwen3", 24, 1, 5, hidden_size=75),
    "part of a head": lambda path: make_family_checkpoint(
        path, "phi4mini", original_max_position_embeddings=512
    ),
    "no rotation": lambda path: make_family_checkpoint(path, "smollm3"),
    "factors": lambda path: make_family_checkpoint(path, "granite"),
    # A window that ends in the shared prefix, and in most requests before it.
    "window": lambda path: make_checkpoint(
        path, "qwen2", use_sliding_window=True, sliding_window=150, max_window_layers=1
    ),
    "gemma3": lambda path: make_family_checkpoint(path, "gemma3"),
    "moe": make_moe_checkpoint,
    "hybrid": make_hybrid_checkpoint,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
}
CASES = [(model, setting) for model in MODELS for setting in SETTINGS]
SHARED = [(7 * i * i + i) % 198 + 1 for i in range(330)]
PROMPTS = [
    *([*SHARED, i, i + 3] for i in (5, 6, 7)),
    [*SHARED[:150], 9],
    [3],
    *([(i * k) % 198 + 1 for i in range(n)] for k, n in ((3, 17), (5, 64), (11, 65), (13, 200))),
    [8, 9, 10, 11] * 30,  # n-grams repeat
]


def params(i: int) -> SamplingParams:
    """Greedy and sampled, with and without filters, rules and log-probabilities of the prompt."""
    return SamplingParams(
        temperature=0.8 * (i % 2),
        seed=i,
        top_k=20 * (i % 3),
        max_tokens=12,
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=1 if i % 4 == 1 else None,
        presence_penalty=0.5 * (i % 5 == 3),
    )


def results(llm: Any, order: list[int] | None = None, alone: bool = False) -> dict[int, Any]:
    """The tokens and log-probabilities of PROMPTS, given in an order, together or one by one."""
    order = [*range(len(PROMPTS))] if order is None else order
    groups = [[i] for i in order] if alone else [order]
    found = {}
    for group in groups:
        asked = [PROMPTS[i] for i in group], [params(i) for i in group]
        for i, result in zip(group, llm.generate(*asked, use_tqdm=False), strict=True):
            output = result.outputs[0]
            found[i] = output.token_ids, numbers(output.logprobs), numbers(result.prompt_logprobs)
    return found


def numbers(logprobs: Any) -> list[Any]:
    """Return (token, log-probability) of each entry, in order."""
    return [at and [(t, p.logprob) for t, p in at.items()] for at in logprobs or ()]


NO_STATES = "swap_space", "speculative_config"
WAYS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks": {"max_num_batched_tokens": 37, "max_num_seqs": 5},
    "preemption": {"num_kv_cache_blocks": 36, "swap_space": 0.001},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}},
}


@pytest.mark.parametrize(("model", "setting"), CASES)
def test_same_bits(tmp_path, model: str, setting: str) -> None:
    MODELS[model](tmp_path)
    options = SETTINGS[setting] | {"attention_backend": "numba", "num_kv_cache_blocks": 400}
    before = torch.get_num_threads()
    wanted = results(random_llm(tmp_path, enable_prefix_caching=False, **options), alone=True)
    try:
        for threads, (way, changes) in enumerate(WAYS.items()):
            if model == "hybrid":  # states have neither a host cache nor drafts
                changes = {name: v for name, v in changes.items() if name not in NO_STATES}
            torch.set_num_threads(1 + threads % 2)
            llm = random_llm(tmp_path, **options | changes)
            assert results(llm) == wanted, way
            order = [3, 9, 8, 0, 5, 2, 1, 4, 7, 6]
            assert results(llm, order) == wanted, f"{way}, again"  # with prefix hits
    finally:
        torch.set_num_threads(before)


# ---- all kinds of requests, beside others ----

Prompts = list[list[int]]
HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None


def samples(llm: LLM, prompts: Prompts, rest: dict[str, Any]) -> list[Any]:
    params = SamplingParams(n=3, seed=2, top_p=0.9, max_tokens=5, ignore_eos=True, **rest)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[(out.token_ids, numbers(out.logprobs)) for out in x.outputs] for x in outputs]


def streamed(llm: LLM, prompts: Prompts) -> list[Any]:
    found: dict[int, list[Any]] = defaultdict(list)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=6, ignore_eos=True, logprobs=2)
    for new in llm.stream(prompts, params):
        found[new.request_index] += zip(new.token_ids, numbers(new.logprobs), strict=True)
    return [found[i] for i in range(len(prompts))]


def beams(llm: LLM, prompts: Prompts) -> list[Any]:
    """Beams of several widths, and with a grammar, where the model has a tokenizer."""
    grammar = StructuredOutputsParams(regex="[0-9a-z ]+")
    has_grammar = HAS_GRAMMARS and llm.engine.input_processor.vocab_size > 199
    params = [
        BeamSearchParams(
            2 + n % 3, 5, structured_outputs=grammar if has_grammar and n % 2 else None
        )
        for n in map(len, prompts)
    ]
    outputs = llm.beam_search(prompts, params, use_tqdm=False)
    return [[(beam.tokens, beam.cum_logprob) for beam in x.sequences] for x in outputs]


def continuations(llm: LLM, prompts: Prompts) -> list[Any]:
    ends = [[5, 6, 7], [5], [9] * 20]
    pairs = [(prompt, end) for prompt in prompts for end in ends]
    outputs = llm.loglikelihood(*map(list, zip(*pairs, strict=True)), use_tqdm=False)
    found = [(x.token_logprobs, x.is_greedy) for x in outputs]
    return [found[i : i + len(ends)] for i in range(0, len(found), len(ends))]


KINDS: dict[str, Callable[[LLM, Prompts], list[Any]]] = {
    "samples": lambda llm, prompts: samples(llm, prompts, dict(logprobs=2, min_p=0.01)),
    "whole vocabulary": lambda llm, prompts: samples(llm, prompts, dict(logprobs=-1)),
    "streams": streamed,
    "beams": beams,
    "log-likelihoods": continuations,
    "embeddings": lambda llm, prompts: [
        x.outputs.embedding for x in llm.embed(prompts, use_tqdm=False)
    ],
}


def maker(path: Path, model: str, setting: str) -> Callable[..., LLM]:
    """Return a function that makes an engine of a checkpoint, or of the embedded model."""
    options = SETTINGS[setting] | {"attention_backend": "numba", "max_logprobs": -1}
    if model == "nano":
        return lambda **more: LLM(device="cpu", **options | more)
    MODELS[model](path)
    return lambda **more: random_llm(path, **options | more)


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        *(("nano", "bfloat16"), ("nano", "float32"), ("odd", "bfloat16"), ("moe", "bfloat16")),
        *(("hybrid", "bfloat16"), ("qwen3", "int8"), ("window", "bfloat16"), ("gemma3", "float32")),
    ],
)
def test_kinds_of_requests(tmp_path, model: str, setting: str) -> None:
    """Random prompts, of which some share a beginning, with random budgets and sizes of blocks."""
    rng = random.Random(f"{model} {setting}")
    make, size = maker(tmp_path, model, setting), 1042 if model == "nano" else 199
    shared = [rng.randrange(1, size) for _ in range(290)]
    lengths = (0, 1), (0, 40), (150, 3), (290, 1), (290, 20), (290, 20)
    prompts = [
        shared[:n] + [rng.randrange(1, size) for _ in range(rng.randint(1, m))] for n, m in lengths
    ]
    alone = make(enable_prefix_caching=False, num_kv_cache_blocks=60)
    wanted = {kind: [ask(alone, [p])[0] for p in prompts] for kind, ask in KINDS.items()}
    for block_size in (3, 32):
        budget = rng.randint(20, 200)
        sizes = dict(block_size=block_size, num_kv_cache_blocks=3000 // block_size)
        llm = make(max_num_batched_tokens=budget, max_num_seqs=rng.randint(5, 12), **sizes)
        for kind, ask in KINDS.items():
            for i in range(5):  # they run meanwhile
                beside = SamplingParams(max_tokens=9, logprobs=-1) if i == 4 else params(i)
                llm.engine.add_request(PROMPTS[rng.randrange(len(PROMPTS))], beside)
            order = rng.sample(range(len(prompts)), len(prompts))
            found = ask(llm, [prompts[i] for i in order])
            assert found == [wanted[kind][i] for i in order], (kind, block_size, budget)


@pytest.mark.parametrize("model", ["nano", "hybrid"])
def test_one_prompt_several_times(tmp_path, model: str) -> None:
    """As vLLM's tests/v1/determinism: equal prompts behind a prefix hit, in chunks of any size."""
    make = maker(tmp_path, model, "bfloat16")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
    found = []
    for warm, budget, number in ((0, 1000, 1), (1, 67, 1), (1, 67, 3), (1, 130, 8), (1, 1000, 8)):
        llm = make(num_kv_cache_blocks=400, max_num_batched_tokens=budget)
        if warm:
            llm.generate([SHARED[:208]], SamplingParams(max_tokens=1), use_tqdm=False)
        for output in llm.generate([SHARED] * number, params, use_tqdm=False):
            assert output.num_cached_tokens >= 192 * warm
            found.append((output.outputs[0].token_ids, numbers(output.outputs[0].logprobs)))
    assert all(each == found[0] for each in found)


def test_prefix_cache_on_disk_and_in_host_memory(tmp_path) -> None:
    """Blocks that are copied to a file, or to host memory, and back."""
    make_checkpoint(tmp_path)
    options = SETTINGS["bfloat16"] | {"attention_backend": "numba"}
    wanted = results(random_llm(tmp_path, enable_prefix_caching=False, **options), alone=True)
    llm = random_llm(tmp_path, num_kv_cache_blocks=30, swap_space=0.001, **options)
    assert [results(llm) for _ in range(2)] == [wanted, wanted]
    assert llm.stats()["host_loads"] > 0
    llm.save_prefix_cache(tmp_path / "cache")
    llm = random_llm(tmp_path, num_kv_cache_blocks=100, **options)
    assert llm.load_prefix_cache(tmp_path / "cache") > 300
    assert results(llm) == wanted
    assert llm.stats()["prefix_hit_rate"] > 0.3


# ---- wrong versions ----


def clear_code() -> None:
    """Forget which code multiplies weights: the next engine asks for it again."""
    for function in (simd.float_product, product.quantized_product, experts.addresses_for):
        function.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ANOTHER_ORDER)
def test_wrong_versions_are_caught(name: str, tmp_path, monkeypatch) -> None:
    place, function, text, replacement, model, setting = IN_ANOTHER_ORDER[name]
    module = importlib.import_module(f"nanovllm.backends.cpu.{place}")
    *owner, function = function.split(".")
    target = getattr(module, owner[0]) if owner else module
    right = getattr(target, function)
    source = textwrap.dedent(inspect.getsource(getattr(right, "py_func", right)))
    assert source.count(text) == 1
    scope = vars(primitives) | vars(module)
    source = source[source.index("def ") :].replace(text, replacement)
    exec(f"from __future__ import annotations\n{source}", scope)
    wrong = scope[function]
    if hasattr(right, "py_func"):
        exact = not right.targetoptions["fastmath"]
        wrong = numba.njit(wrong, error_model="numpy", fastmath=set() if exact else jit.FASTMATH)
    monkeypatch.setattr(target, function, wrong)
    if place == "kernels.attention":
        monkeypatch.setattr("nanovllm.backends.cpu.attention.attend_groups", wrong)
    MODELS[model](tmp_path)
    options = SETTINGS[setting] | {"attention_backend": "numba", "num_kv_cache_blocks": 400}
    clear_code()
    try:
        alone = results(random_llm(tmp_path, enable_prefix_caching=False, **options), alone=True)
        assert results(random_llm(tmp_path, max_num_batched_tokens=300, **options)) != alone
    finally:
        clear_code()
