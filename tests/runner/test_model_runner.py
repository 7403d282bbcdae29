"""The log-probabilities of a step, and steps whose logits are not numbers."""

import math
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB, random_llm

from nanovllm import GenerationError, SamplingParams


@pytest.mark.parametrize("backend", ["numba", "sdpa"])
def test_a_model_that_computes_nan(path: Path, backend: str) -> None:
    """NaN in one logit of a step ends its requests; later steps are right again."""
    llm = random_llm(path, num_kv_cache_blocks=64, attention_backend=backend)
    model, last = llm.engine.runner.model, torch.tensor([VOCAB - 1])
    logits, model.logits = (
        model.logits,
        lambda hidden: logits(hidden).index_fill(1, last, math.nan),
    )
    for fields in ({"temperature": 0}, {"temperature": 0.8, "seed": 1}, {"top_k": 5}):
        params = SamplingParams(**fields, max_tokens=4, ignore_eos=True)
        with pytest.raises(GenerationError, match="the model computed NaN") as error:
            llm.generate([[1, 2], [3]], params, use_tqdm=False)
        assert not error.value.outputs[0].outputs[0].token_ids
    model.logits = logits
    assert len(llm.generate([1, 2], params, use_tqdm=False)[0]["token_ids"]) == 4


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"async_scheduling": True}])
def test_logprobs(checkpoint, options: dict) -> None:
    """Of prompt and output, before temperature and rules, also in chunks and after a prefix hit."""
    path, model = checkpoint
    llm = random_llm(path, **options)
    prompt = [1 + 7 * i % 150 for i in range(40)]
    params = SamplingParams(
        temperature=3.0,
        seed=1,
        max_tokens=9,
        ignore_eos=True,
        logprobs=4,
        prompt_logprobs=2,
        top_k=20,
        repetition_penalty=1.2,
    )
    llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)  # the prefix is cached now
    out = llm.generate(prompt, params, use_tqdm=False)[0]
    ids = torch.tensor([prompt + out["token_ids"]])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    found = [*out.prompt_logprobs, *out.outputs[0].logprobs]
    assert out.prompt_logprobs[0] is None
    assert len(found) == len(prompt) + 9
    total = 0.0
    for position in range(1, len(found)):
        token, want = ids[0, position].item(), logprobs[position - 1]
        k = 2 if position < len(prompt) else 4
        entry = found[position][token]
        assert entry.logprob == pytest.approx(want[token].item(), abs=1e-3)
        assert entry.rank == (want > want[token]).sum() + 1
        top = set(want.topk(k).indices.tolist())
        assert set(found[position]) == top | {token}
        if position >= len(prompt):
            total += entry.logprob
    assert out.outputs[0].cumulative_logprob == pytest.approx(total)
