"""Log-likelihoods equal transformers', whatever the steps, and a shared stem is computed once."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB, random_llm
from engines import EACH_WAY, still_serves

from nanovllm import LLM, LoglikelihoodOutput, PoolingParams, SamplingParams
from nanovllm.plan import StepPlan

STEM = [(7 * i + 3) % VOCAB for i in range(40)]
ENDS = [[5], [6, 7, 8], [9] * 20, [5, 6], [(11 * i) % VOCAB for i in range(50)]]
PAIRS = [*((STEM, end) for end in ENDS), ([1], [2]), ([3], [4] * 33), (STEM[:16], ENDS[2])]


def reference(model: torch.nn.Module, stem: list[int], end: list[int]) -> tuple[torch.Tensor, bool]:
    """transformers' log-probabilities of the tokens of `end`, and whether each is the likeliest."""
    with torch.inference_mode():
        logits = model(torch.tensor([stem + end])).logits[0, len(stem) - 1 : -1]
    ids = torch.tensor(end)
    logprobs = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return logprobs, bool((logits.argmax(-1) == ids).all())


def same(found: list[LoglikelihoodOutput], model: torch.nn.Module, pairs: list) -> None:
    assert len(found) == len(pairs)
    for output, (stem, end) in zip(found, pairs, strict=True):
        want, is_greedy = reference(model, stem, end)
        torch.testing.assert_close(torch.tensor(output.token_logprobs), want, atol=1e-4, rtol=0)
        assert output.logprob == pytest.approx(sum(output.token_logprobs))
        assert output.is_greedy == is_greedy
        assert output.token_ids == end


def score(llm: LLM, pairs: list) -> list[LoglikelihoodOutput]:
    stems, ends = zip(*pairs, strict=True)
    return llm.loglikelihood(list(stems), list(ends), use_tqdm=False)


@pytest.mark.parametrize("options", EACH_WAY, ids=str)
def test_equal_in_any_steps(
    checkpoint: tuple[Path, torch.nn.Module], options: dict[str, object]
) -> None:
    path, model = checkpoint
    llm = random_llm(path, **options)
    for _ in range(2):
        same(score(llm, PAIRS), model, PAIRS)
    assert not llm.engine.scheduler.has_work()
    assert llm.stats()["blocks_in_use"] == llm.stats()["output_tokens"] == 0


def test_a_stem_is_computed_once(llm: LLM, monkeypatch) -> None:
    """Of later answers only the last partial block of the stem is computed, and no last token."""
    llm.reset_prefix_cache()
    plans: list[StepPlan] = []
    run = llm.engine.runner.run
    monkeypatch.setattr(llm.engine.runner, "run", lambda plan: plans.append(plan) or run(plan))
    outputs = llm.loglikelihood(STEM, ENDS, use_tqdm=False)
    (plan,) = plans
    assert [(c.start, len(c.token_ids)) for c in plan.chunks] == [
        (0, 40),
        *((32, 8 + len(end) - 1) for end in ENDS[1:]),
    ]
    assert [c.logprob_targets for c in plan.chunks] == ENDS
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 32, 32, 32]
    # A stem that ends with a block keeps its last token for the first of the continuation.
    (short,) = llm.loglikelihood(STEM[:32], [5], use_tqdm=False)
    (long,) = llm.loglikelihood(STEM[:33], [5], use_tqdm=False)
    assert (short.num_cached_tokens, long.num_cached_tokens) == (16, 32)


def test_steps_shared_with_generation(checkpoint: tuple[Path, torch.nn.Module], llm: LLM) -> None:
    """Beside prompt_logprobs with another number of log-probabilities, and their equal."""
    engine, model = llm.engine, checkpoint[1]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=4)
    alone = llm.generate(STEM, params, use_tqdm=False)[0]
    llm.reset_prefix_cache()
    asked = engine.add_request(STEM, params)
    found = score(llm, PAIRS)
    same(found, model, PAIRS)
    other = None
    while engine.has_unfinished_requests():
        (other,) = engine.step() or [None]
    assert other.request_id == asked
    assert other.outputs[0].token_ids == alone.outputs[0].token_ids
    for one, two in zip(alone.prompt_logprobs, other.prompt_logprobs, strict=True):
        if one is not None:
            assert list(one.items()) == list(two.items())
    (output,) = llm.loglikelihood(STEM[:1], STEM[1:], use_tqdm=False)
    want = [entry[t].logprob for t, entry in zip(STEM[1:], alone.prompt_logprobs[1:], strict=True)]
    assert output.token_logprobs == want


def test_a_pair_may_fill_the_model(checkpoint: tuple[Path, torch.nn.Module], llm: LLM) -> None:
    """The last token is not computed, so that there is room for one more."""
    stem = [(3 * i) % VOCAB for i in range(120)]
    same(score(llm, [(stem, [1] * 9)]), checkpoint[1], [(stem, [1] * 9)])
    with pytest.raises(ValueError, match="130 tokens, and may have 129 with"):
        score(llm, [(stem, [1] * 10)])


def test_strings_are_encoded_together(embedded: LLM) -> None:
    tokenizer = embedded.get_tokenizer()
    for text, end in (("What is 3 + 4?\n", "7"), ("Name a ", "fruit, please"), ("12", "34")):
        whole, stem = tokenizer.encode(text + end), tokenizer.encode(text.rstrip())
        (output,) = embedded.loglikelihood(text, end, use_tqdm=False)
        assert output.token_ids == whole[len(stem) :]
        (plain,) = embedded.loglikelihood(stem, whole[len(stem) :], use_tqdm=False)
        assert output.logprob == plain.logprob
    answers = [tokenizer.encode(text) for text in ("12 + 30 = 42", "12 + 30 = 47")]
    right, wrong = embedded.loglikelihood(tokenizer.encode("What is 12 + 30?\n"), answers)
    assert right.is_greedy
    assert right.logprob > wrong.logprob + 1
    assert not wrong.is_greedy


def test_pairs_of_dicts(embedded: LLM) -> None:
    """A dict with text is its text, and one with token ids these ids, whatever the other one is."""
    encode, (text, end) = embedded.get_tokenizer().encode, ("What is 12 + 30?", "\n12 + 30 = 42")
    ids, new = {"prompt_token_ids": encode(text)}, {"prompt": "", "prompt_token_ids": encode(end)}
    want = embedded.loglikelihood(text, end, use_tqdm=False)[0].token_logprobs
    for pair in (
        ({"prompt": text}, end),
        (text, {"prompt": end}),
        ({"prompt": text}, {"prompt": end}),
        ([{"prompt": text}], [{"prompt": end}]),
        (text, new),
        ({"prompt": text}, encode(end)),
        (ids, new),
        (ids | {"prompt": "other"}, encode(end)),
    ):
        found = embedded.loglikelihood(*pair, use_tqdm=False)
        assert found[0].token_logprobs == want, pair
    for stem, last in ((ids, end), (ids, {"prompt": end}), (ids | {"prompt": text}, end)):
        with pytest.raises(TypeError, match="is text, and its prompt is token ids"):
            embedded.loglikelihood(stem, last, use_tqdm=False)


def test_nan_ends_only_its_request(llm: LLM, monkeypatch) -> None:
    run = llm.engine.runner.run

    def with_nan(plan: StepPlan) -> object:
        output = run(plan)()
        entries = output.results[plan.chunks[-1].row].prompt_logprobs
        entries[0] = [(token, math.nan, rank) for token, _, rank in entries[0]]
        return lambda: output

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.runner, "run", with_nan)
        with pytest.raises(ArithmeticError, match="the model computed NaN"):
            score(llm, PAIRS)
    assert not llm.engine.has_unfinished_requests()
    assert not llm.engine.scheduler.has_work()
    assert len(score(llm, PAIRS)) == len(PAIRS)


CALLS = [
    (lambda llm: llm.embed([[1]], SamplingParams()), TypeError, "pooling_params must be a Pooling"),
    (lambda llm: llm.embed([[1]], {"dimensions": 3}), TypeError, "pooling_params must be a Pooli"),
    (lambda llm: llm.embed([[1]], [PoolingParams()] * 2), ValueError, "1 prompts but 2 pooling_pa"),
    (lambda llm: llm.embed([[1]], PoolingParams(), dimensions=3), TypeError, "not both"),
    (lambda llm: llm.embed([[1] * 161]), ValueError, "161 tokens, and may have 160 with"),
    (lambda llm: llm.generate([[1]], PoolingParams()), TypeError, "must be a SamplingParams"),
    (lambda llm: next(llm.stream([[1]], PoolingParams())), TypeError, "must be a SamplingParams"),
    (
        lambda llm: next(llm.stream([[1], [VOCAB]])),
        ValueError,
        r"prompts\[1\]: the prompt has token id",
    ),
    (lambda llm: llm.loglikelihood([[1]] * 2, [[2]] * 3), ValueError, "2 prompts but 3 continuat"),
    (lambda llm: llm.loglikelihood([1], []), None, ""),
    (lambda llm: llm.loglikelihood([], []), None, ""),
    (lambda llm: llm.loglikelihood([], [[2]]), ValueError, "0 prompts but 1 continuations"),
    (lambda llm: llm.loglikelihood([[1]], [[]]), ValueError, "the continuation is empty"),
    (lambda llm: llm.loglikelihood([[]], [[1]]), ValueError, "the prompt is empty"),
    (lambda llm: llm.loglikelihood([1], "a"), TypeError, "the continuation 'a' is text, and its"),
    (lambda llm: llm.loglikelihood([1], [VOCAB]), ValueError, f"token id {VOCAB}"),
    (lambda llm: llm.loglikelihood([1], [[2], [1.5]]), TypeError, "pair 1: .* not 1.5"),
    (lambda llm: llm.loglikelihood([1], None), TypeError, "continuations must be a string"),
    (lambda llm: llm.loglikelihood("a", "b"), ValueError, "no tokenizer"),
]


@pytest.mark.parametrize(("call", "error", "word"), CALLS)
def test_calls_of_embed_and_loglikelihood(
    small_llm: LLM, call: Callable, error: type[Exception] | None, word: str
) -> None:
    if error is None:
        assert call(small_llm) == []
    else:
        with pytest.raises(error, match=word):
            call(small_llm)
    still_serves(small_llm)


def test_continuations_that_add_no_token(embedded: LLM) -> None:
    for prompt, end, word in (
        ("a", "", "the continuation is empty"),
        (" ", "b", "the prompt is empty"),
        ("", "b", "the prompt is empty"),
    ):
        with pytest.raises(ValueError, match=word):
            embedded.loglikelihood(prompt, end)
    still_serves(embedded)
