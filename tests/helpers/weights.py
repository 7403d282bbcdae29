"""Pairs of random checkpoints of one kind, and what an engine and transformers say of prompts."""

from collections.abc import Callable
from pathlib import Path

import torch
from checkpoints import make_checkpoint
from hybrid_checkpoints import make_hybrid_checkpoint
from moe_checkpoints import make_moe_checkpoint

from nanovllm import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
PROMPTS = [[(7 * i + 3 * j) % 180 + 1 for j in range(20 + 9 * i)] for i in range(3)]
WIDE = dict(hidden_size=128, intermediate_size=128)
EXPERTS = dict(hidden_size=128, moe_intermediate_size=64)
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "qwen3": lambda path, seed: make_checkpoint(path, seed=seed, **WIDE),
    "tied": lambda path, seed: make_checkpoint(path, seed=seed, tie=True, **WIDE),
    "biases": lambda path, seed: make_checkpoint(path, "qwen2", seed=seed),
    "hybrid": lambda path, seed: make_hybrid_checkpoint(path, seed=seed),
    "experts": lambda path, seed: make_moe_checkpoint(path, seed=seed, **EXPERTS),
    "hybrid experts": lambda path, seed: make_moe_checkpoint(
        path, seed=seed, hybrid=True, shared_expert_intermediate_size=64, **EXPERTS
    ),
}
OPTIONS = {
    "float32": {},
    "bfloat16": dict(dtype="bfloat16"),
    "int8": dict(quantization="int8"),
    "int4": dict(quantization="int4"),
    "torch": dict(attention_backend="sdpa"),
    "torch int4": dict(attention_backend="sdpa", quantization="int4"),
}


Pair = list[tuple[Path, torch.nn.Module]]  # checkpoints, with transformers' models


def pair(kind: str, path: Path) -> Pair:
    """Make an old and a new checkpoint of a kind of MODELS in a folder."""
    paths = path / "old", path / "new"
    return [(path, MODELS[kind](path, seed)) for seed, path in enumerate(paths)]


def answers(llm: LLM) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens, and the log-probabilities of all tokens but the first of each prompt."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    entries = [e for out in outputs for e in [*out.prompt_logprobs[1:], *out.outputs[0].logprobs]]
    found = [logprob.logprob for entry in entries for logprob in entry.values()]
    return [list(out.outputs[0].token_ids) for out in outputs], torch.tensor(found)


def logprobs_of(model: torch.nn.Module, tokens: list[list[int]]) -> torch.Tensor:
    """What transformers' model says of the same tokens."""
    found = []
    for prompt, output in zip(PROMPTS, tokens, strict=True):
        ids = torch.tensor([prompt + output])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].log_softmax(-1)
        found.append(logits.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)
