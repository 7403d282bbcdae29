"""The fields of SamplingParams and StructuredOutputsParams: defaults, copies, wrong values."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.config import EngineConfig


def test_clone_and_from_optional() -> None:
    def first(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits

    params = SamplingParams(
        stop=["a"], logit_bias={1: 2.0}, allowed_token_ids=[3], logits_processors=[first], seed=4
    )
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    clone.logit_bias[5] = 1.0
    clone.allowed_token_ids.append(6)
    assert (params.stop, params.logit_bias, params.allowed_token_ids) == (["a"], {1: 2.0}, [3])
    assert clone.logits_processors[0] is first

    fields = SamplingParams.__dataclass_fields__
    none = SamplingParams.from_optional(**dict.fromkeys(fields))
    assert none == SamplingParams(max_tokens=None)
    given = dict(n=2, temperature=0.5, stop="a", max_tokens=5, logit_bias={1: 1.0})
    assert SamplingParams.from_optional(**given, top_p=None) == SamplingParams(**given)
    for value in (None, 1.0):
        with pytest.raises(TypeError, match="'temprature'"):
            SamplingParams.from_optional(temprature=value)


def test_a_seed_of_minus_one_is_none(embedded: LLM) -> None:
    """As in vLLM; each sample of one prompt differs then."""
    assert SamplingParams(seed=-1) == SamplingParams(seed=None)
    params = SamplingParams(seed=4)
    params.seed = -1
    assert params.clone().seed is None
    params = SamplingParams(seed=-1, temperature=9.0, max_tokens=8, ignore_eos=True)
    outputs = embedded.generate(["a"] * 2, params, use_tqdm=False)
    assert outputs[0]["token_ids"] != outputs[1]["token_ids"]


def test_numbers_of_numpy_and_torch() -> None:
    """They are replaced by the numbers that they hold, as in the options of LLM()."""
    params = SamplingParams(
        max_tokens=np.int64(5),
        temperature=np.float32(0.5),
        top_k=torch.tensor(3),
        ignore_eos=np.bool_(True),
    )
    assert params == SamplingParams(max_tokens=5, temperature=0.5, top_k=3, ignore_eos=True)
    assert [type(x) for x in (params.max_tokens, params.temperature)] == [int, float]
    config = EngineConfig(max_num_seqs=np.int64(5), gpu_memory_utilization=np.float32(0.5))
    assert config == EngineConfig(max_num_seqs=5, gpu_memory_utilization=0.5)
    assert type(config.max_num_seqs) is int


@pytest.mark.parametrize("number", [np.int32, np.int64, torch.tensor])
def test_numbers_of_numpy_and_torch_in_lists(embedded: LLM, number: Any) -> None:
    """They were refused. The objects that callers pass are not changed."""
    ids, bias = [number(5), number(6)], {number(5): np.float32(1.5)}
    params = SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, logit_bias=bias)
    same = SamplingParams(stop_token_ids=[5, 6], allowed_token_ids=[5, 6], logit_bias={5: 1.5})
    assert params == same
    values = [*params.stop_token_ids, *params.allowed_token_ids, *params.logit_bias]
    assert {type(value) for value in values} == {int}
    assert type(params.logit_bias[5]) is float
    assert len(ids) == 2
    assert not any(type(token) is int for token in [*ids, *bias])
    params.max_tokens = same.max_tokens = 3
    found, wanted = embedded.generate(["a", "a"], [params, same], use_tqdm=False)
    assert found["token_ids"] == wanted["token_ids"]
    array = np.array([5, 6])
    whole = SamplingParams(stop_token_ids=array, allowed_token_ids=array)
    assert whole == SamplingParams(stop_token_ids=[5, 6], allowed_token_ids=[5, 6])


def test_forms_that_vllm_accepts() -> None:
    assert SamplingParams(logprobs=True).logprobs == 1
    assert SamplingParams(prompt_logprobs=True).prompt_logprobs == 1
    assert type(SamplingParams(logprobs=True).logprobs) is int
    bias = {"5": 1.0, 6: -1.0}  # the token ids of JSON are strings
    assert SamplingParams.from_optional(logit_bias=bias).logit_bias == {5: 1.0, 6: -1.0}
    with pytest.raises(TypeError, match="a token id of logit_bias must be an int, not 'a'"):
        SamplingParams.from_optional(logit_bias={"a": 1.0})


PARAMS = [
    ({"top_p": 0}, ValueError, "top_p"),
    ({"stop_token_ids": [-1]}, ValueError, "of stop_token_ids"),
    ({"stop_token_ids": "12"}, TypeError, "stop_token_ids"),
    ({"min_tokens": 9, "max_tokens": 8}, ValueError, "max_tokens=8"),
    ({"stop": ["a", ""]}, ValueError, "stop holds the empty string ''"),
    ({"stop": 3}, TypeError, "a string or a list"),
    ({"stop": [3]}, TypeError, "strings"),
    ({"stop": "a", "detokenize": False}, ValueError, "detokenize=True"),
    ({"logit_bias": [1, 2]}, TypeError, "logit_bias"),
    ({"logit_bias": {"a": 1.0}}, TypeError, "logit_bias"),
    ({"allowed_token_ids": []}, ValueError, "None allows every token"),
    ({"allowed_token_ids": [1.5]}, TypeError, "of allowed_token_ids"),
    ({"bad_words": " "}, TypeError, "bad_words"),
    ({"bad_words": ["\n"]}, ValueError, r"bad_words holds the blank string '\\n'"),
    ({"max_tokens": 10**31}, ValueError, r"must be at least 1, and less than 1e\+30, not 10{31}"),
    ({"logit_bias": {1: -1e30}}, ValueError, r"must be between -1e\+30 and 1e\+30, not -1e"),
    ({"temperature": np.float32(-0.5)}, ValueError, r"at least 0, not -0\.5"),
    ({"max_tokens": np.float32(2)}, TypeError, r"must be an int, not 2\.0"),
    ({"logits_processors": ["f"]}, TypeError, "functions"),
    ({"structured_outputs": {"regex": "a"}}, TypeError, "must be a StructuredOutputsParams, not"),
]
STRUCTURED = [
    ({}, ValueError, "exactly one of json, regex, choice, grammar, json_object, not none"),
    ({"json_object": False}, ValueError, "not none"),
    ({"json": "{}", "regex": "a"}, ValueError, "not json and regex"),
    ({"regex": re.compile("a")}, TypeError, "regex must be a string"),
    ({"grammar": ["start"]}, TypeError, "grammar must be a string"),
]


@pytest.mark.parametrize(("fields", "error", "word"), STRUCTURED, ids=str)
def test_structured_outputs(fields: dict, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        StructuredOutputsParams(**fields)


LISTS = ("stop", "stop_token_ids", "bad_words", "logits_processors")


def name_of(value: Any) -> str:
    """The same in each of the two processes, which an address would not be."""
    return re.sub(r" at 0x\w+", "", str(value))


@pytest.mark.parametrize(("fields", "error", "word"), PARAMS, ids=name_of)
def test_sampling_params(fields: dict, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        SamplingParams(**fields)


def test_none_is_the_default_of_lists() -> None:
    params = SamplingParams(**dict.fromkeys(LISTS))
    assert params == SamplingParams()
    params.stop_token_ids.append(3)  # as in vLLM, each is a list of its own
    assert SamplingParams().stop_token_ids == []
    assert SamplingParams(stop="a", bad_words=("b",), allowed_token_ids=(1,)) == SamplingParams(
        stop=["a"], bad_words=["b"], allowed_token_ids=[1]
    )


def test_penalty_that_overflows(small_llm: LLM) -> None:
    for penalty in (1e-38, 0.0099):
        with pytest.raises(ValueError, match=r"repetition_penalty must be at least 0\.01"):
            SamplingParams(repetition_penalty=penalty)
    params = SamplingParams(repetition_penalty=0.01, temperature=0, max_tokens=3, ignore_eos=True)
    # The least penalty prefers the tokens of the prompt, and not token 0.
    tokens = small_llm.generate([5, 6, 7], params, use_tqdm=False)[0]["token_ids"]
    assert set(tokens) <= {5, 6, 7}
