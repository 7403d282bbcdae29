"""A decode step in one call samples the tokens that it samples layer by layer."""

import pytest
import torch
from checkpoints import make_checkpoint, random_llm

from nanovllm import GenerationError, SamplingParams

pytest.importorskip("numba")

from nanovllm.backends.cpu.fused_step import FusedStep

GREEDY = [SamplingParams(temperature=0, max_tokens=20 + i, ignore_eos=True) for i in range(6)]
DRAWN = [
    SamplingParams(temperature=0.8 * (i % 3), top_k=9 * (i % 2), top_p=0.9, seed=i, max_tokens=20)
    for i in range(6)
]


def tokens(llm, prompts, params) -> tuple[list[list[int]], int]:
    """Return the tokens, and how many steps were one call."""
    runner, calls = llm.engine.runner, 0
    inner = runner.fused_step

    def counted(plan):
        nonlocal calls
        found = inner(plan)
        calls += found is not None
        return found

    runner.fused_step = counted
    outputs = llm.generate(prompts, params, use_tqdm=False)
    runner.fused_step = inner
    return [output["token_ids"] for output in outputs], calls


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_tokens(tmp_path, quantization, tie: bool, params) -> None:
    make_checkpoint(tmp_path, tie=tie, vocab_size=192)
    llm = random_llm(tmp_path, dtype="float32", quantization=quantization)
    step = llm.engine.runner.fused_step
    assert isinstance(step, FusedStep)
    prompts = [[3 + i] * (7 + 9 * i) for i in range(6)]
    found, calls = tokens(llm, prompts, params)
    assert calls > 15
    llm.engine.runner.fused_step = lambda plan: None
    assert tokens(llm, prompts, params) == (found, 0)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_drafts(tmp_path, monkeypatch, quantization) -> None:
    """Tokens with drafts, right and wrong ones, of several rows next to rows without drafts."""
    make_checkpoint(tmp_path, vocab_size=192)
    prompts = [[3 + i, 4, 5, 6 + i] * (2 + 9 * i) for i in range(6)]
    options = dict(dtype="float32", quantization=quantization)
    llm = random_llm(tmp_path, **options)
    wanted = [tokens(llm, prompts, params)[0] for params in (GREEDY, DRAWN)]
    longest = 0
    sampled = FusedStep.__call__

    def checked(self, plan):
        nonlocal longest
        found = sampled(self, plan)
        if any(chunk.num_drafts for chunk in plan.chunks):
            assert found is not None
            longest = max(longest, len(found))
        return found

    monkeypatch.setattr(FusedStep, "__call__", checked)
    llm = random_llm(tmp_path, **options, speculative_config={"method": "ngram"})
    found = [llm.generate(prompts, params, use_tqdm=False) for params in (GREEDY, DRAWN)]
    assert [[output["token_ids"] for output in outputs] for outputs in found] == wanted
    assert longest > 8
    stats = llm.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


def test_steps_that_are_not_one_call(tmp_path) -> None:
    """A long prefix is read once for several sequences, and rules are applied to the logits."""
    make_checkpoint(tmp_path, vocab_size=192)
    llm = random_llm(tmp_path, dtype="float32")
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    shared = [[3] * 280 + [i] for i in range(2)]
    assert tokens(llm, shared, greedy)[1] == 0
    assert tokens(llm, shared[:1], greedy)[1] == 19
    assert tokens(llm, [[3] * 9 + [i] for i in range(2)], greedy)[1] == 19
    short = [[3] * 40 + [i] * 300 for i in range(2)]  # as chats with one system prompt
    assert tokens(llm, short, greedy)[1] == 19
    rules = SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.1, ignore_eos=True)
    assert tokens(llm, shared[:1], rules)[1] == 0


def test_logits_that_are_nan(tmp_path) -> None:
    make_checkpoint(tmp_path, vocab_size=192)
    llm = random_llm(tmp_path, dtype="float32")
    runner = llm.engine.runner
    step = runner.fused_step

    def spoiled(plan):
        runner.model.norm.fill_(torch.nan)
        return step(plan)

    runner.fused_step = spoiled
    with pytest.raises(GenerationError, match="NaN"):
        llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
