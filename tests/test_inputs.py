"""The forms of prompts, and prompts that are refused."""

import numpy as np
import pytest
import torch
from checkpoints import VOCAB
from engines import still_serves

from nanovllm import LLM, SamplingParams, TextPrompt, TokensPrompt

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_forms_of_prompts(embedded: LLM) -> None:
    text = "What is 3 + 4?\n"
    ids = embedded.get_tokenizer().encode(text)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    outs = embedded.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(o["token_ids"]) for o in outs}) == 1
    assert [o.prompt for o in outs] == [text, None, text, None]
    assert all(o.prompt_token_ids == ids for o in outs)
    for form, out in zip(forms, outs, strict=True):
        assert embedded.generate(form, GREEDY, use_tqdm=False)[0]["token_ids"] == out["token_ids"]
    assert embedded.generate([], use_tqdm=False) == []


def test_token_ids_of_tokenizers_numpy_and_torch(embedded: LLM) -> None:
    tokenizer = embedded.get_tokenizer()
    texts = ["What is 3 + 4?\n", "Spell cat\n"]
    one, two = rows = [tokenizer.encode(text) for text in texts]
    brief = SamplingParams(temperature=0, max_tokens=1)
    for prompts, want in (
        (np.array(one), [one]),
        (torch.tensor(one), [one]),
        (list(torch.tensor(one)), [one]),
        (torch.tensor([one, one], dtype=torch.int32), [one, one]),
        (list(map(np.array, rows)), [one, two]),
        (list(np.array(one)), [one]),
        ([np.array(one), two, texts[0]], [one, two, one]),
        (list(np.array(texts)), [one, two]),
        (np.array(texts), [one, two]),
        (tokenizer(texts)["input_ids"], [one, two]),
        (tokenizer(texts[0], return_tensors="pt")["input_ids"], [one]),
        ({"prompt_token_ids": np.array(one)}, [one]),
    ):
        outs = embedded.generate(prompts, brief, use_tqdm=False)
        assert [o.prompt_token_ids for o in outs] == want
        assert all(type(token) is int for token in outs[0].prompt_token_ids)
    embedded.engine.add_request(np.array(one), brief)
    assert embedded.engine.step()[0].prompt_token_ids == one


def test_vllms_dicts_of_prompts(embedded: LLM) -> None:
    ids = embedded.get_tokenizer().encode("Spell cat\n")
    prompts = [TextPrompt(prompt="Spell cat\n"), TokensPrompt(prompt_token_ids=ids, prompt="x")]
    outs = embedded.generate(prompts, GREEDY, use_tqdm=False)
    assert prompts == [{"prompt": "Spell cat\n"}, {"prompt_token_ids": ids, "prompt": "x"}]
    assert [out.prompt for out in outs] == ["Spell cat\n", "x"]
    assert [out["text"] for out in outs] == ["c-a-t"] * 2


PROMPTS = [
    ("hello", ValueError, "token ids"),  # this engine has no tokenizer
    ([[]], ValueError, "empty"),
    ([[1], []], ValueError, r"prompts\[1\]: .*empty"),
    (np.array([], dtype=np.int64), ValueError, "empty"),
    ([VOCAB], ValueError, f"token id {VOCAB}"),
    ([1, -1], ValueError, "token id -1"),
    ([[1, "a"]], TypeError, "'a'"),
    ([True], TypeError, "True"),
    ({}, ValueError, "nothing else"),
    ({"prompt_token_ids": [1], "multi_modal_data": {}}, ValueError, "multi_modal_data"),
    ([{"role": "user", "content": "hi"}], ValueError, "; use chat for messages"),
    ({"prompt_token_ids": "abc"}, TypeError, "'abc'"),
    ({"prompt": [1, 2]}, TypeError, "must be a string"),
    (5, TypeError, "prompts"),
    (None, TypeError, "prompts"),
    (np.array([1.0]), TypeError, "must be an int, not 1.0"),
    (np.array([[1], [2]]) > 1, TypeError, r"prompts\[0\]: .*must be an int, not False"),
    (torch.ones(2, 3), TypeError, "must be an int, not 1.0"),
    (torch.ones(1, 2, 2, dtype=torch.int64), TypeError, r"must be an int, not \[1, 1\]"),
    (
        {"input_ids": [1], "attention_mask": [1]},
        ValueError,
        "; pass the input_ids of a tokenizer's",
    ),
    ([None], TypeError, "None"),
    ([1] * 160, ValueError, "max_model_len=160"),
]


def test_keys_of_a_prompt_that_are_none(small_llm: LLM) -> None:
    """As in vLLM, they change nothing."""
    prompt = {"prompt": None, "prompt_token_ids": [1, 2], "multi_modal_data": None}
    params = SamplingParams(temperature=0, max_tokens=2)
    [out] = small_llm.generate(prompt, params, use_tqdm=False)
    assert out["token_ids"] == small_llm.generate([1, 2], params, use_tqdm=False)[0]["token_ids"]


@pytest.mark.parametrize(("prompt", "error", "word"), PROMPTS, ids=lambda x: str(x)[:30])
def test_prompts(small_llm: LLM, prompt: object, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        small_llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)
    if "max_model_len" not in word:
        with pytest.raises(error, match=word):
            small_llm.embed(prompt, use_tqdm=False)
        with pytest.raises(error):
            small_llm.loglikelihood(prompt, [[3], [4]], use_tqdm=False)
        with pytest.raises((TypeError, ValueError)):
            small_llm.loglikelihood([[3]], prompt, use_tqdm=False)
    still_serves(small_llm)
