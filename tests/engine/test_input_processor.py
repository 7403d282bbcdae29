"""Requests that do not fit the model, the tokenizer or the cache, and the limits of an output."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from checkpoints import VOCAB, random_llm
from engines import still_serves

from nanovllm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams

REQUESTS = [
    ({"logprobs": VOCAB + 1}, f"logprobs={VOCAB + 1} is more than max_logprobs=20"),
    ({"allowed_token_ids": [VOCAB]}, f"token id {VOCAB}"),
    ({"logit_bias": {VOCAB: 1.0}}, f"token id {VOCAB}"),
    (
        {"stop_token_ids": [3, VOCAB]},
        f"stop_token_ids has token id {VOCAB}; the vocabulary is 0 to",
    ),
    ({"logprobs": 21}, "logprobs=21 is more than max_logprobs=20; ask for fewer .*, or give LLM"),
    ({"prompt_logprobs": 21}, "prompt_logprobs=21 is more than max_logprobs=20"),
    ({"logprobs": -1}, f"logprobs=-1 .* max_logprobs=20; .* vocabulary of {VOCAB}"),
    ({"prompt_logprobs": -1}, "prompt_logprobs=-1 is more than max_logprobs=20"),
    ({"stop": "x"}, "has no tokenizer"),
    ({"bad_words": ["x"]}, "has no tokenizer"),
    ({"structured_outputs": StructuredOutputsParams(regex="a")}, "needs a tokenizer"),
]


@pytest.mark.parametrize(("fields", "word"), REQUESTS, ids=str)
def test_params_that_do_not_fit_the_model(small_llm: LLM, fields: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        small_llm.generate([[1]], SamplingParams(**fields), use_tqdm=False)
    still_serves(small_llm)


NOT_THERE = [
    ({"bad_words": ["zebra"]}, "bad_words has 'zebra', which is encoded with token id 1042"),
    ({"bad_words": ["a", "a zebra"]}, "bad_words has 'a zebra', .* the vocabulary is 0 to 1041"),
    ({"stop_token_ids": [1043]}, "stop_token_ids has token id 1043"),
    ({"logit_bias": {1043: 1.0}}, "logit_bias has token id 1043"),
    ({"allowed_token_ids": [1043, 2]}, "allowed_token_ids has token id 1043"),
]


@pytest.mark.parametrize("backend", ["numba", "sdpa"])
def test_tokens_that_the_model_does_not_have(larger_tokenizer: Path, backend: str) -> None:
    """A tokenizer with tokens that were added without another row of the embedding table."""
    llm = LLM(
        dtype="float32",
        device="cpu",
        tokenizer=str(larger_tokenizer),
        attention_backend=backend,
        num_kv_cache_blocks=64,
    )
    question, greedy = "What is 12 + 30?\n", SamplingParams(temperature=0, max_tokens=20)
    for fields, word in NOT_THERE:
        with pytest.raises(ValueError, match=word):
            llm.generate([question] * 2, [greedy, SamplingParams(**fields)], use_tqdm=False)
    for call in (
        lambda: llm.generate("zebra", use_tqdm=False),
        lambda: llm.embed("a zebra", use_tqdm=False),
        lambda: llm.loglikelihood("a ", "zebra", use_tqdm=False),
        lambda: llm.loglikelihood("a", [1042], use_tqdm=False),
        lambda: llm.beam_search("zebra", BeamSearchParams(2, 3), use_tqdm=False),
    ):
        with pytest.raises(ValueError, match="token id 1042; the vocabulary is 0 to 1041"):
            call()
    assert llm.generate(question, greedy, use_tqdm=False)[0]["text"] == "12 + 30 = 42"
    assert not llm.engine.has_unfinished_requests()


def test_text_that_makes_no_tokens(embedded: LLM, monkeypatch) -> None:
    for call in (
        lambda: embedded.generate("\ud800", use_tqdm=False),
        lambda: embedded.chat([{"role": "user", "content": "\ud800"}], use_tqdm=False),
        lambda: embedded.generate("x", SamplingParams(bad_words=["\ud800"]), use_tqdm=False),
    ):
        with pytest.raises(ValueError, match="UTF-8"):
            call()
    unknown = Exception("Unk token not found")  # as tokenizers raises it
    for encode, word in (
        (Mock(side_effect=unknown), "the tokenizer cannot encode 'x': Unk token not found"),
        (Mock(return_value=[]), "empty"),
        (Mock(return_value=[10**6]), "token id 1000000"),
    ):
        monkeypatch.setattr(embedded.engine.input_processor.tokenizer, "encode", encode)
        with pytest.raises(ValueError, match=word):
            embedded.generate("x", use_tqdm=False)
    monkeypatch.undo()
    still_serves(embedded)


def test_changed_params_are_checked_again(small_llm: LLM) -> None:
    params = small_llm.get_default_sampling_params()
    params.max_tokens = 3
    assert len(small_llm.generate([[1]], params, use_tqdm=False)[0]["token_ids"]) <= 3
    assert small_llm.get_default_sampling_params().max_tokens != 3
    params.top_p = 7
    with pytest.raises(ValueError, match="top_p"):
        small_llm.generate([[1]], params, use_tqdm=False)


def test_largest_request_that_fits(small_llm: LLM) -> None:
    """10 blocks of 16: 160 tokens."""
    for max_tokens in (60, 61, None):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        (out,) = small_llm.generate([1] * 100, params, use_tqdm=False)
        assert len(out.outputs[0].token_ids) == 60
    with pytest.raises(ValueError, match=r"160 tokens, and may have 159 with max_model_len=160"):
        small_llm.generate([1] * 160, use_tqdm=False)
    still_serves(small_llm)


def test_plain_parameters_make_no_rules(embedded: LLM) -> None:
    """Rows with rules take a slower path, so the usual parameters must not have any."""
    for fields in ({}, {"stop_token_ids": [3]}, {"top_k": 5, "seed": 1}, {"logits_processors": []}):
        params = SamplingParams(**fields)
        inputs = embedded.engine.input_processor
        assert inputs.make_task(inputs, params).rules is None


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_max_logprobs(path: Path, name: str) -> None:
    """For both fields, in every call; -1 is the whole vocabulary, and candidates do not count."""
    for most, good, bad in (
        (3, (0, 3), (4, VOCAB, -1)),
        (0, (0,), (1, -1)),
        (-1, (0, VOCAB, -1), ()),
        (VOCAB - 1, (VOCAB - 1,), (VOCAB, -1)),
        (VOCAB + 1, (VOCAB, -1), ()),
    ):
        llm = random_llm(path, max_logprobs=most)
        for k in good:
            params = SamplingParams(max_tokens=2, ignore_eos=True, **{name: k})
            (out,) = llm.generate([[1, 2]], params, use_tqdm=False)
            entries = out.outputs[0].logprobs if name == "logprobs" else out.prompt_logprobs[1:]
            assert {len(entry) for entry in entries} <= {max(k, 1), k + 1, VOCAB}
            assert any(new.finish_reason for new in llm.stream([[1, 2]], params))
        for k in bad:
            params, message = SamplingParams(**{name: k}), f"{name}={k} is more than max_logprobs="
            with pytest.raises(ValueError, match=f"{message}{most}"):
                llm.generate([[1]], params, use_tqdm=False)
            with pytest.raises(ValueError, match=f"{message}{most}"):
                next(llm.stream([[1]], params))
            with pytest.raises(ValueError, match=f"{message}{most}"):
                llm.engine.add_request([1], params)
        (found,) = llm.beam_search([1, 2], BeamSearchParams(16, 2), use_tqdm=False)
        assert len(found.sequences) == 16
        assert not llm.engine.has_unfinished_requests()
