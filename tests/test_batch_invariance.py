"""On the CPU's kernels a request has the same tokens and log-probabilities, to the last bit, alone
and in any company: batches, chunks, prefix hits, shared prefixes, preemption, drafts, threads.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, random_llm
from hybrid_checkpoints import make_hybrid_checkpoint
from moe_checkpoints import make_moe_checkpoint

from nanovllm import SamplingParams

pytest.importorskip("numba")

Make = Callable[[Path], Any]
MODELS: dict[str, Make] = {
    "qwen3": make_checkpoint,
    "qwen2": lambda path: make_checkpoint(path, "qwen2", 64),
    "llama": lambda path: make_checkpoint(path, "llama", 80, 1, 3),
    # Neither heads, nor hidden size, nor MLP fill whole blocks and words.
    "odd": lambda path: make_checkpoint(path, "qwen3", 24, 1, 5, hidden_size=75),
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
CASES = [
    (model, setting)
    for model in MODELS
    for setting in SETTINGS
    if (model, setting) not in {("moe", "int8"), ("moe", "int4")}  # experts of whole blocks only
]
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
            output, prompt = result.outputs[0], result.prompt_logprobs
            logprobs = [{t: p.logprob for t, p in at.items()} for at in output.logprobs]
            before = [at and {t: p.logprob for t, p in at.items()} for at in prompt or ()]
            found[i] = output.token_ids, logprobs, before
    return found


NO_STATES = "swap_space", "speculative_config"
WAYS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks": {"max_num_batched_tokens": 37, "max_num_seqs": 5},
    "preemption": {"num_kv_cache_blocks": 36, "swap_space": 0.001},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}},
}


@pytest.mark.parametrize(("model", "setting"), CASES)
def test_same_bits(tmp_path: Path, model: str, setting: str) -> None:
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
