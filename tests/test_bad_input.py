"""Every bad input is refused before anything runs, by a message that helps, and breaks nothing."""

import copy
import json
import logging
import os
import pickle
import re
import shutil
import signal
import threading
import typing
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import numpy as np
import pytest
import torch
from checkpoints import VOCAB, random_llm
from transformers import AutoTokenizer

import nanovllm
from nanovllm import (
    LLM,
    BeamSearchParams,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from nanovllm.api.config import EngineConfig
from nanovllm.api.vllm_names import VLLM_OPTIONS
from nanovllm.features.embeddings.sentence_transformers import read_pooling_settings
from nanovllm.loading import make_runner as start
from nanovllm.loading import memory
from nanovllm.loading.checkpoint import Checkpoint, find_checkpoint
from nanovllm.models.config import FIELDS, ModelConfig

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="session")
def llm(path: Path) -> LLM:
    return random_llm(path, max_model_len=300, num_kvcache_blocks=10)


def one_argument(logits: Any) -> Any: ...


def four_arguments(a: Any, b: Any, c: Any, d: Any) -> Any: ...


PARAMS = [
    ({"temperature": -1}, ValueError, "temperature"),
    ({"temperature": NAN}, ValueError, "temperature"),
    ({"temperature": INF}, ValueError, "temperature"),
    ({"temperature": "hot"}, TypeError, "temperature"),
    ({"temperature": True}, TypeError, "temperature"),
    ({"top_p": 0}, ValueError, "top_p"),
    ({"top_p": 1.1}, ValueError, "top_p"),
    ({"top_p": NAN}, ValueError, "top_p"),
    ({"top_k": -2}, ValueError, "top_k"),
    ({"top_k": 1.5}, TypeError, "top_k"),
    ({"min_p": -0.1}, ValueError, "min_p"),
    ({"min_p": NAN}, ValueError, "min_p"),
    ({"min_p": 2}, ValueError, "min_p"),
    ({"max_tokens": 0}, ValueError, "max_tokens"),
    ({"max_tokens": "all"}, TypeError, "max_tokens"),
    ({"temperature": 10**400}, ValueError, "temperature"),
    ({"seed": 1.0}, TypeError, "seed"),
    ({"seed": 2**64}, ValueError, "seed"),
    ({"ignore_eos": 1}, TypeError, "ignore_eos"),
    ({"stop_token_ids": [-1]}, ValueError, "stop token"),
    ({"stop_token_ids": "12"}, TypeError, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, TypeError, "stop token"),
    ({"n": 0}, ValueError, "n must be"),
    ({"n": 10**9}, ValueError, "16384"),
    ({"min_tokens": -1}, ValueError, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, ValueError, "max_tokens=8"),
    ({"stop": [""]}, ValueError, "empty string"),
    ({"stop": ""}, ValueError, "empty string"),
    ({"stop": 3}, TypeError, "a string or a list"),
    ({"stop": [3]}, TypeError, "strings"),
    ({"stop": "a", "detokenize": False}, ValueError, "detokenize=True"),
    ({"include_stop_str_in_output": "yes"}, TypeError, "include_stop_str_in_output"),
    ({"presence_penalty": 3}, ValueError, "between -2 and 2"),
    ({"frequency_penalty": NAN}, ValueError, "frequency_penalty"),
    ({"repetition_penalty": 0}, ValueError, "repetition_penalty"),
    ({"repetition_penalty": INF}, ValueError, "repetition_penalty"),
    ({"logit_bias": [1, 2]}, TypeError, "logit_bias"),
    ({"logit_bias": {1: NAN}}, ValueError, "logit_bias"),
    ({"logit_bias": {"a": 1.0}}, TypeError, "logit_bias"),
    ({"allowed_token_ids": []}, ValueError, "None allows every token"),
    ({"allowed_token_ids": [1.5]}, TypeError, "allowed token"),
    ({"bad_words": " "}, TypeError, "bad_words"),
    ({"bad_words": [" "]}, ValueError, "empty string"),
    ({"logprobs": -2}, ValueError, "logprobs"),
    ({"prompt_logprobs": True}, TypeError, "prompt_logprobs"),
    ({"skip_special_tokens": 0}, TypeError, "skip_special_tokens"),
    ({"detokenize": None}, TypeError, "detokenize"),
    ({"logits_processors": ["f"]}, TypeError, "functions"),
    ({"best_of": 3}, TypeError, "cumulative_logprob"),
    ({"logits_processors": [one_argument]}, TypeError, r"\(output ids, logits\) or"),
    ({"logits_processors": [four_arguments]}, TypeError, "which .* does not take"),
    ({"guided_decoding": {}}, TypeError, "structured_outputs=StructuredOutputsParams"),
    ({"guided_json": {}}, TypeError, "no .* 'guided_json'; use the field 'json' of structured_out"),
    ({"guided_regex": "a"}, TypeError, "use the field 'regex' of structured_outputs"),
    ({"guided_whitespace_pattern": " "}, TypeError, "x-guidance in the schema"),
    ({"structured_outputs": {"regex": "a"}}, TypeError, "must be a StructuredOutputsParams, not"),
    ({"length_penalty": 1.0}, TypeError, "LLM.beam_search"),
    ({"min_characters": 1}, TypeError, "known: n, temperature"),
    ({"temprature": 1}, TypeError, "'temperature'"),
    ({"max_token": 1}, TypeError, "'max_tokens'"),
]
STRUCTURED = [
    ({}, ValueError, "exactly one of json, regex, choice, grammar, json_object, not none"),
    ({"json_object": False}, ValueError, "not none"),
    ({"json": "{}", "regex": "a"}, ValueError, "not json and regex"),
    ({"json": "{"}, ValueError, "json='{' is not JSON: Expecting"),
    ({"json": "[1]"}, TypeError, "json must be a JSON schema"),
    ({"json": 3}, TypeError, "json must be a JSON schema, .* not 3"),
    ({"json": {"a": {1}}}, ValueError, "is not JSON: .*not JSON serializable"),
    ({"regex": 3}, TypeError, "regex must be a string"),
    ({"regex": re.compile("a")}, TypeError, "regex must be a string"),
    ({"choice": "ab"}, TypeError, "choice must be a list of strings, not 'ab'"),
    ({"choice": ["a", 3]}, TypeError, "choice must be a list of strings"),
    ({"choice": []}, ValueError, "choice is empty"),
    ({"grammar": ["start"]}, TypeError, "grammar must be a string"),
    ({"json_object": "yes"}, TypeError, "json_object must be True or False"),
    ({"structural_tag": "x"}, TypeError, "'structural_tag'; write a grammar of the whole output"),
    ({"json": {}, "whitespace_pattern": " "}, TypeError, '"x-guidance": {"whitespace_pattern"'),
    ({"json": {}, "disable_any_whitespace": True}, TypeError, "JSON is always on one line"),
    ({"json": False}, TypeError, "json must be a JSON schema, .* not False"),
    ({"json": False, "regex": "a"}, ValueError, "not json and regex"),
    ({"json": ""}, ValueError, "json='' is not JSON"),
    ({"choice": False}, TypeError, "choice must be a list of strings, not False"),
    ({"regex": False}, TypeError, "regex must be a string"),
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


def test_attributes_that_do_not_exist() -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError, match="'max_token'.*'max_tokens'"):
        params.max_token = 5
    with pytest.raises(AttributeError, match="cumulative_logprob"):
        params.best_of = 5
    params.max_tokens = 5
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params


META = torch.ones(2, dtype=torch.int64, device="meta")  # has no numbers
PROMPTS = [
    ("hello", ValueError, "token ids"),  # this engine has no tokenizer
    ([[]], ValueError, "empty"),
    ([[1], []], ValueError, r"prompts\[1\]: .*empty"),
    ({"prompt_token_ids": []}, ValueError, "empty"),
    ([VOCAB], ValueError, f"token id {VOCAB}"),
    ([1, -1], ValueError, "token id -1"),
    ([[1, "a"]], TypeError, "'a'"),
    ([[1, 2.0]], TypeError, "2.0"),
    ([True], TypeError, "True"),
    ({}, ValueError, "nothing else"),
    ({"text": "x"}, ValueError, "nothing else"),
    ({"prompt_token_ids": [1], "multi_modal_data": {}}, ValueError, "multi_modal_data"),
    ({"prompt_token_ids": "abc"}, TypeError, "'abc'"),
    ({"prompt": [1, 2]}, TypeError, "must be a string"),
    (5, TypeError, "prompts"),
    (None, TypeError, "prompts"),
    ([1.0, 2.0], TypeError, "must be an int, not 1.0"),
    (np.array([1.0]), TypeError, "must be an int, not 1.0"),
    (np.array([[1], [2]]) > 1, TypeError, r"prompts\[0\]: .*must be an int, not False"),
    (torch.ones(2, 3), TypeError, "must be an int, not 1.0"),
    (torch.ones(1, 2, 2, dtype=torch.int64), ValueError, r"one dimension, .* not \(1, 2, 2\)"),
    (np.array([], dtype=int), ValueError, "empty"),
    (np.int64(5), TypeError, "prompts"),
    (META, TypeError, "cannot be read from Tensor .*meta.*give a list or a dense tensor"),
    (META[None], TypeError, "give a list or a dense tensor"),
    ([META, [1]], TypeError, r"prompts\[0\]: .*give a list or a dense tensor"),
    (list(META), TypeError, "token id must be an int, not tensor.*meta"),
    ({"prompt_token_ids": META}, TypeError, "give a list or a dense tensor"),
    ({"input_ids": [[1, 2]], "attention_mask": META[None]}, TypeError, "give a list or a dense"),
    ({"input_ids": [1, 2], "attention_mask": list(META)}, TypeError, "give a list or a dense"),
    (torch.ones(3, dtype=torch.int64).to_sparse(), TypeError, "give a list or a dense tensor"),
    ({"input_ids": [1], "pixel_values": 0}, ValueError, "remove pixel_values"),
    ({"input_ids": [1, 1], "attention_mask": [0, 0]}, ValueError, "empty"),
    ([None], TypeError, "None"),
    ([1] * 300, ValueError, "max_model_len=300"),
    ([1] * 200, ValueError, "10"),  # fits max_model_len, never the pool of 160 slots
]


@pytest.mark.parametrize(("prompt", "error", "word"), PROMPTS, ids=lambda x: str(x)[:30])
def test_prompts(llm: LLM, prompt: object, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)
    still_serves(llm)


def still_serves(llm: LLM) -> None:
    assert not llm.engine.has_unfinished_requests()
    assert not llm.engine.scheduler.has_work()
    assert len(llm.generate([1, 2], SamplingParams(max_tokens=2), use_tqdm=False)) == 1


REQUESTS = [
    ({"logprobs": VOCAB + 1}, f"more than the vocabulary of {VOCAB} tokens"),
    ({"prompt_logprobs": VOCAB + 1}, f"more than the vocabulary of {VOCAB} tokens"),
    ({"allowed_token_ids": [VOCAB]}, f"token id {VOCAB}"),
    ({"logit_bias": {VOCAB: 1.0}}, f"token id {VOCAB}"),
    ({"stop_token_ids": [3, VOCAB]}, f"stop_token_ids has token id {VOCAB}; the vocabulary of"),
    ({"logprobs": 21}, "logprobs=21 is more than max_logprobs=20; ask for fewer, or give LLM"),
    ({"prompt_logprobs": 21}, "prompt_logprobs=21 is more than max_logprobs=20"),
    ({"logprobs": -1}, f"logprobs=-1 .* max_logprobs=20, because -1 .* vocabulary of {VOCAB}"),
    ({"prompt_logprobs": -1}, "prompt_logprobs=-1 is more than max_logprobs=20"),
    ({"stop": "x"}, "need a tokenizer"),
    ({"bad_words": ["x"]}, "need a tokenizer"),
    ({"structured_outputs": StructuredOutputsParams(regex="a")}, "needs a tokenizer"),
]


@pytest.mark.parametrize(("fields", "word"), REQUESTS, ids=str)
def test_params_that_do_not_fit_the_model(llm: LLM, fields: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        llm.generate([[1]], SamplingParams(**fields), use_tqdm=False)
    still_serves(llm)


@pytest.fixture(scope="session")
def larger_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's tokenizer with 40 more tokens: 1042 and 1043 are zebra and <|more|>."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(find_checkpoint("qwen3-nano"))
    tokenizer.add_tokens(["zebra"])
    tokenizer.add_tokens(["<|more|>"], special_tokens=True)
    tokenizer.add_tokens([f"zebra{i}" for i in range(38)])
    tokenizer.save_pretrained(path)
    return path


NOT_THERE = [
    ({"bad_words": ["zebra"]}, "bad_words has 'zebra', which is encoded with token id 1042"),
    (
        {"bad_words": ["a", "a zebra"]},
        "bad_words has 'a zebra', .* vocabulary of the model ends at",
    ),
    ({"stop_token_ids": [1043]}, "stop_token_ids has token id 1043"),
    ({"logit_bias": {1043: 1.0}}, "logit_bias has token id 1043"),
    ({"allowed_token_ids": [1043, 2]}, "allowed_token_ids has token id 1043"),
]


@pytest.mark.parametrize("backend", ["numba", "sdpa"])
def test_tokens_that_the_model_does_not_have(larger_tokenizer: Path, backend: str) -> None:
    """A tokenizer with tokens that were added without another row of the embedding table."""
    llm = LLM(dtype="float32", device="cpu", tokenizer=str(larger_tokenizer),
              attention_backend=backend, num_kvcache_blocks=64)  # fmt: skip
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
        with pytest.raises(ValueError, match="token id 1042 is outside the vocabulary of 1042"):
            call()
    assert llm.generate(question, greedy, use_tqdm=False)[0]["text"] == "12 + 30 = 42"
    assert not llm.engine.has_unfinished_requests()


def test_an_end_token_that_the_model_does_not_have(
    larger_tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokenizer's end token is known only at the end of loading."""
    tokenizer = AutoTokenizer.from_pretrained(larger_tokenizer)
    tokenizer.eos_token = "<|more|>"
    tokenizer.save_pretrained(tmp_path)
    with caplog.at_level("WARNING", logger="nanovllm"):
        llm = LLM(dtype="float32", device="cpu", tokenizer=str(tmp_path), num_kvcache_blocks=64)
    assert any("end-of-sequence tokens [1043] are outside" in text for text in caplog.messages)
    assert llm.engine.outputs.eos_token_ids == llm.engine.inputs.eos_token_ids == {1033, 1035}
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=2)
    assert llm.generate("What is 12 + 30?\n", params, use_tqdm=False)[0]["text"] == "12 + 30 = 42"


def test_a_long_prompt_has_one_message(embedded: LLM) -> None:
    """Not a warning of transformers too, which it prints for the first one of a tokenizer."""
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    embedded.get_tokenizer().deprecation_warnings.clear()
    logging.getLogger("transformers").addHandler(handler)
    try:
        with pytest.raises(ValueError, match="max_model_len=1024"):
            embedded.generate("What is 12 + 30?\n" * 200, use_tqdm=False)
        with pytest.raises(ValueError, match="max_model_len=1024"):
            embedded.chat([{"role": "user", "content": "12 " * 2000}], use_tqdm=False)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert said == []


def test_more_tokens_than_the_model_has(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An output ends with the model's length, as in vLLM. The first such request is reported."""
    llm = random_llm(path, max_model_len=20)
    caplog.clear()
    with caplog.at_level("WARNING", logger="nanovllm"):
        params = SamplingParams(max_tokens=17, ignore_eos=True)
        assert len(llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]["token_ids"]) == 17
        params.max_tokens = None
        assert len(llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]["token_ids"]) == 17
        assert caplog.messages == []
        params.max_tokens = 18
        for output in llm.generate([[1, 2, 3]] * 2, params, use_tqdm=False):
            assert len(output["token_ids"]) == 17
            assert output.outputs[0].finish_reason == "length"
    (message,) = caplog.messages
    assert "max_tokens=18, but max_model_len=20 leaves 17 after a prompt of 3 tokens" in message


def test_text_that_makes_no_tokens(embedded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="UTF-8"):
        embedded.generate("\ud800", use_tqdm=False)
    with pytest.raises(ValueError, match="UTF-8"):
        embedded.chat([{"role": "user", "content": "\ud800"}], use_tqdm=False)
    with pytest.raises(ValueError, match="UTF-8"):
        embedded.generate("x", SamplingParams(bad_words=["\ud800"]), use_tqdm=False)

    def missing(text: str, **_: object) -> None:
        raise Exception("Unk token not found")  # as tokenizers does

    monkeypatch.setattr(embedded.engine.tokenizer, "encode", missing)
    with pytest.raises(ValueError, match="the tokenizer cannot encode 'x': Unk token not found"):
        embedded.generate("x", use_tqdm=False)
    monkeypatch.setattr(embedded.engine.tokenizer, "encode", lambda text, **_: [])
    with pytest.raises(ValueError, match="empty"):
        embedded.generate(" ", use_tqdm=False)
    monkeypatch.setattr(embedded.engine.tokenizer, "encode", lambda text, **_: [10**6])
    with pytest.raises(ValueError, match="token id 1000000"):
        embedded.generate("x", use_tqdm=False)
    monkeypatch.undo()
    still_serves(embedded)


def test_changed_params_are_checked_again(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens = 3
    assert len(llm.generate([[1]], params, use_tqdm=False)[0]["token_ids"]) <= 3
    assert llm.get_default_sampling_params().max_tokens != 3
    params.top_p = 7
    with pytest.raises(ValueError, match="top_p"):
        llm.generate([[1]], params, use_tqdm=False)


def test_extreme_but_valid_params(llm: LLM) -> None:
    """What float32 cannot hold is still the right draw: the likeliest token."""
    greedy = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    for fields in (
        {"temperature": 1e-40},
        {"temperature": 1e-38, "top_k": 2**70},
        {"top_p": 1e-60},
    ):
        params = SamplingParams(max_tokens=9, **fields)
        out = llm.generate([[5, 6]], params, use_tqdm=False)
        assert out[0]["token_ids"] == greedy[0]["token_ids"], fields


def test_chats(embedded: LLM) -> None:
    for messages, error, word in (
        ([], ValueError, "empty"),
        ([[]], ValueError, "empty"),
        ([{"content": "hi"}], ValueError, "'role'"),
        ([{"role": 3, "content": "hi"}], ValueError, "'role'"),
        (["hi"], ValueError, "not 'hi'"),
        ("hi", TypeError, "messages must be a list"),
        (None, TypeError, "messages must be a list"),
        ({"role": "user", "content": "hi"}, TypeError, "messages must be a list"),
        ([{"role": "user"}], TypeError, "content of a message .* not None"),
        ([{"role": "user", "content": 5}], TypeError, "content of a message .* not 5"),
        ([{"role": "user", "content": [5]}], ValueError, "type 5 is not supported"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            ValueError,
            "'image_url' is not supported: the models take text only",
        ),
    ):
        with pytest.raises(error, match=word):
            embedded.chat(messages, use_tqdm=False)
    with pytest.raises(Exception, match="no such role"):
        embedded.chat(
            [{"role": "user", "content": "hi"}],
            chat_template="{{ raise_exception('no such role') }}",
            use_tqdm=False,
        )
    still_serves(embedded)


def test_lists_of_unequal_length(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts but 3 sampling_params"):
        llm.generate([[1], [2]], [SamplingParams()] * 3)
    with pytest.raises(TypeError, match="SamplingParams"):
        llm.generate([[1], [2]], {"temperature": 1})
    with pytest.raises(TypeError, match="SamplingParams"):
        llm.generate([[1], [2]], [SamplingParams(), 0.5])
    still_serves(llm)


def test_largest_request_that_fits(llm: LLM) -> None:
    """10 blocks of 16: 160 slots, and the last token needs none."""
    out = llm.generate([1] * 100, SamplingParams(max_tokens=61, ignore_eos=True), use_tqdm=False)
    assert len(out[0]["token_ids"]) == 61
    with pytest.raises(ValueError, match=r"takes 11 KV blocks of 16; the cache has 10"):
        llm.generate([1] * 100, SamplingParams(max_tokens=62), use_tqdm=False)
    still_serves(llm)


OPTIONS = [
    ({"max_num_seq": 4}, TypeError, "'max_num_seqs'"),
    ({"blocksize": 4}, TypeError, "kvcache_block_size"),
    ({"block_size": 4.0}, TypeError, "kvcache_block_size must be an int, not 4.0"),
    ({"block_size": 4, "kvcache_block_size": 16}, ValueError, "=16 are two names of one option"),
    ({"kvcache_block_size": 16, "block_size": 4}, ValueError, "block_size=4 and kvcache_block_s"),
    ({"max_logprobs": -2}, ValueError, "max_logprobs must be at least -1"),
    ({"max_logprobs": 2.0}, TypeError, "max_logprobs must be an int"),
    ({"max_num_seqs": 0}, ValueError, "max_num_seqs"),
    ({"max_num_seqs": 2.0}, TypeError, "max_num_seqs"),
    ({"max_num_batched_tokens": 0}, ValueError, "max_num_batched_tokens"),
    ({"kvcache_block_size": -1}, ValueError, "kvcache_block_size"),
    ({"max_model_len": 513}, ValueError, "512"),
    ({"max_model_len": 0}, ValueError, "max_model_len"),
    ({"num_kvcache_blocks": 0}, ValueError, "num_kvcache_blocks"),
    (
        {"kv_cache_memory_bytes": 100, "num_kvcache_blocks": None},
        ValueError,
        "no room for one block",
    ),
    (
        {"kv_cache_memory_bytes": 10**16, "num_kvcache_blocks": None},
        ValueError,
        "lower num_kvcache",
    ),
    ({"swap_space": -1}, ValueError, "swap_space must be 0 or more"),
    ({"swap_space": "4GiB"}, TypeError, "swap_space must be a number"),
    ({"swap_space": 2**-40}, ValueError, "swap_space=.* has no room for one block"),
    ({"swap_space": 10**7}, ValueError, "takes 10,737,418,240,000,000 bytes of host memory"),
    ({"swap_space": 1, "enable_prefix_caching": False}, ValueError, "needs the prefix cache"),
    ({"swap_space": 1, "kv_offloading_size": 2}, ValueError, "are two names of one option"),
    ({"kv_offloading_size": True}, TypeError, "swap_space must be a number, not True"),
    ({"kv_offloading_backend": "lmcache"}, ValueError, "kv_offloading_backend='lmcache' is not"),
    ({"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization"),
    ({"gpu_memory_utilization": NAN}, ValueError, "gpu_memory_utilization"),
    ({"gpu_memory_utilization": "all"}, TypeError, "gpu_memory_utilization"),
    ({"device": "tpu"}, ValueError, "tpu"),
    ({"device": "cuda:00"}, ValueError, "device must be"),
    ({"device": "cuda:x"}, ValueError, "cuda:x"),
    ({"dtype": "int8"}, ValueError, "float32"),
    ({"scheduling_policy": "lifo"}, ValueError, "fcfs"),
    ({"attention_backend": "flash"}, ValueError, "sdpa"),
    ({"tensor_parallel_size": 2}, ValueError, "WORLD_SIZE is 1; .* torchrun --nproc-per-node 2 "),
    ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size must be at least 1, not 0"),
    ({"load_format": "pickle"}, ValueError, "dummy"),
    ({"enforce_eager": "yes"}, TypeError, "enforce_eager"),
    ({"async_scheduling": 2}, TypeError, "async_scheduling"),
    ({"seed": None}, TypeError, "seed"),
    ({"tokenizer": 3}, TypeError, "tokenizer"),
    ({"skip_tokenizer_init": False}, ValueError, "skip_tokenizer_init=True"),  # it has none
    ({"trust_remote_code": True}, ValueError, "trust_remote_code=True is not supported: .*never"),
    ({"quantization": "awq"}, ValueError, "must be one of int8, not 'awq'"),
    ({"tensor_parallel_sise": 1}, TypeError, "did you mean 'tensor_parallel_size'"),
    ({"mamba_cache_mode": "auto"}, TypeError, "unknown option .*; known: model, device, dtype"),
]


@pytest.mark.parametrize(("options", "error", "word"), OPTIONS, ids=str)
def test_options(path: Path, options: dict, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        random_llm(path, **options)


def test_options_of_vllm_that_change_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """None and the listed values of each are accepted, with a line for those who debug."""
    with caplog.at_level("DEBUG", logger="nanovllm"):
        for name, (harmless, reason) in VLLM_OPTIONS.items():
            assert EngineConfig.from_options({name: None}) == EngineConfig()
            for value in harmless if reason else (False, 7, "any"):
                assert EngineConfig.from_options({name: value}) == EngineConfig()
                assert f"{name}={value!r}" in caplog.messages[-1]
            if reason:
                with pytest.raises(ValueError, match=re.escape(f"{name}='other' is not")):
                    EngineConfig.from_options({name: "other"})
    assert not VLLM_OPTIONS.keys() & EngineConfig.__dataclass_fields__.keys()


def test_block_size_is_another_name() -> None:
    for options in ({"block_size": 4}, {"block_size": 4, "kvcache_block_size": 4}):
        assert EngineConfig.from_options(options) == EngineConfig(kvcache_block_size=4)
    options = {"kvcache_block_size": 4, "block_size": None}
    assert EngineConfig.from_options(options).kvcache_block_size == 4
    assert options.keys() == {"kvcache_block_size", "block_size"}


def test_names_of_dtypes() -> None:
    for dtype in ("half", "float16", torch.half):
        assert EngineConfig(dtype=dtype).dtype == "float16"
    for dtype in ("float", "float32", torch.float):
        assert EngineConfig(dtype=dtype).dtype == "float32"


UNKNOWN_FIELDS = [
    (SamplingParams, {}, "max_token", "max_tokens"),
    (BeamSearchParams, {"beam_width": 2, "max_tokens": 3}, "beam_with", "beam_width"),
    (PoolingParams, {}, "dimension", "dimensions"),
    (StructuredOutputsParams, {"regex": "a"}, "grammer", "grammar"),
]


@pytest.mark.parametrize(("kind", "fields", "name", "near"), UNKNOWN_FIELDS)
def test_an_unknown_field_names_a_similar_one(kind, fields, name, near) -> None:
    with pytest.raises(TypeError, match=f"'{name}'; did you mean '{near}'"):
        kind(**fields, **{name: 1})
    params = kind(**fields)
    with pytest.raises(AttributeError, match=name):  # a frozen one says that it is frozen
        setattr(params, name, 1)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params


def test_the_order_of_vllms_add_request(llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"add_request\(prompt, sampling_params, request_id\)"):
        llm.engine.add_request("0", [1, 2], SamplingParams())
    with pytest.raises(TypeError, match=r"add_request\(prompt, sampling_params, request_id\)"):
        llm.engine.add_request("0", [1, 2], PoolingParams())
    still_serves(llm)


def edited(path: Path, tmp_path: Path, **changes: object) -> Path:
    """A copy of the checkpoint whose config.json differs; a change to None removes the field."""
    config = json.loads((path / "config.json").read_text()) | changes
    config = {k: v for k, v in config.items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    return tmp_path


CONFIGS = [
    ({"architectures": ["LlamaForCausalLM"]}, "Qwen3ForCausalLM, Qwen2ForCausalLM"),
    ({"architectures": None}, "Qwen3ForCausalLM"),
    ({"vocab_size": None}, "no 'vocab_size'"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"head_dim": 33}, "odd"),
    ({"num_key_value_heads": 3}, "do not divide"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
    (
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": None,
            "max_window_layers": 0,
        },
        "sliding window of 64",
    ),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "both"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "yarn"),
    ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"intermediate_size": 100}, "misshapen: .*gate_proj"),
    ({"num_hidden_layers": 3}, "missing: .*layers.2"),
    ({"num_hidden_layers": 1}, "unexpected: .*layers.1"),
]


@pytest.mark.parametrize(("changes", "word"), CONFIGS, ids=str)
def test_configs(path: Path, tmp_path: Path, changes: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        random_llm(edited(path, tmp_path, **changes))


WRONG = {
    int: ["a", 1.5, True, [], -7, NAN],
    float: ["a", True, [1.0], -1, NAN, INF, 10**400],
    bool: [1, "yes"],
    str: [3, ["silu"]],
    list: ["Qwen3ForCausalLM", 3, {}],
    dict: ["linear", 3, [[]]],
}
GENERATION = {
    "do_sample": bool,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "max_new_tokens": int,
    "min_new_tokens": int,
}


@pytest.mark.parametrize("field", [name for name in FIELDS if name not in GENERATION])
def test_wrong_values_in_config(path: Path, tmp_path: Path, field: str) -> None:
    kind, limits = FIELDS[field]
    for wrong in WRONG[kind] + ([limits[1] + 1] if kind is int else []):
        changes = {field: wrong}
        if field in ("factor", "rope_type", "type"):
            changes = {"rope_parameters": {"rope_type": "linear", "factor": 2} | changes}
        edited(path, tmp_path, **changes)
        with pytest.raises(ValueError, match=rf"config\.json: {field} must be"):
            _ = Checkpoint(tmp_path).model_config


@pytest.mark.parametrize("field", [*GENERATION, "eos_token_id"])
def test_wrong_values_in_generation_config(path: Path, tmp_path: Path, field: str) -> None:
    edited(path, tmp_path)
    for wrong in WRONG[GENERATION.get(field, int)]:
        if field == "eos_token_id":
            wrong = [5, wrong]
        text = json.dumps({"do_sample": True, field: wrong})
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"generation_config\.json: {field} must be"):
            Checkpoint(tmp_path).generation_defaults()
    edited(path, tmp_path, eos_token_id="a")
    (tmp_path / "generation_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"/config\.json: eos_token_id must be"):
        Checkpoint(tmp_path).generation_defaults()


def test_numbers_of_a_file_become_those_of_their_fields(path: Path, tmp_path: Path) -> None:
    """JSON has one kind of number: 1 can stand for 1.0, and 64.0 for 64."""
    config = json.loads((edited(path, tmp_path) / "config.json").read_text())
    numbers = {n: float(v) for n, v in config.items() if type(v) is int and n in FIELDS}
    numbers |= {"rms_norm_eps": 1, "rope_theta": 10_000}
    assert len(numbers) > 8
    edited(path, tmp_path, **numbers, rope_parameters={"rope_type": "linear", "factor": 2})
    found = Checkpoint(tmp_path).model_config
    for name, kind in typing.get_type_hints(ModelConfig).items():
        value = getattr(found, name)
        assert value is None or kind not in (int, float, bool) or type(value) is kind, name
    assert (found.rms_norm_eps, found.rope_theta, found.rope_factor) == (1, 10_000, 2)
    fields = {"do_sample": True, "temperature": 1, "top_k": 20.0, "top_p": 1, "max_new_tokens": 9.0}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5.0]} | fields))
    eos, sampling = Checkpoint(tmp_path).generation_defaults()
    assert [type(x) for x in (*eos, sampling.top_k, sampling.max_tokens)] == [int] * 3
    assert [type(x) for x in (sampling.temperature, sampling.top_p)] == [float] * 2
    options = dict(load_format="dummy", attention_backend="sdpa")
    llm = random_llm(tmp_path, **options)
    assert len(llm.generate([[1, 2]], use_tqdm=False)[0]["token_ids"]) <= 9


def test_stored_dtype_that_the_engine_does_not_run_in(path: Path, tmp_path: Path) -> None:
    for stored, dtype in (("float64", None), ("torch.bfloat16", "bfloat16")):
        edited(path, tmp_path, dtype=stored)
        assert Checkpoint(tmp_path).model_config.dtype == dtype


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        {},
        3,
        ["model.safetensors"],
        {"a": None},
        {"a": 3},
        {"a": ["model.safetensors"]},
        {"a": "../x.safetensors"},
        {"a": "sub/../../x.safetensors"},
        {"a": "absolute path"},
    ],
    ids=str,
)
def test_wrong_index(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "x.safetensors").write_text("a file outside the checkpoint")
    (tmp_path / "model" / "sub").mkdir(parents=True)
    text = json.dumps({"weight_map": weight_map}).replace(
        "absolute path", str(tmp_path / "x.safetensors")
    )
    (tmp_path / "model" / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json needs a 'weight_map'"):
        Checkpoint(tmp_path / "model").weight_files()


def test_names_of_files_that_are_too_long(path: Path, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for names in (["a" * 5000], ["a\0b"], [f"{i}.safetensors" for i in range(999)]):
        index.write_text(json.dumps({"weight_map": dict(enumerate(names))}))
        with pytest.raises(ValueError, match="names missing files: ") as error:
            Checkpoint(tmp_path).weight_files()
        assert len(str(error.value)) < len(str(index)) + 300
    edited(path, tmp_path)
    index.unlink()
    kinds = ["Transformer", "Pooling"]
    modules = [{"type": f"a.{kind}", "path": "a" * 5000} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert "pooling mode 'mean'" in read_pooling_settings(tmp_path, 8).refused


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="its start cannot be read")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "1_Pooling/config.json"])
def test_files_whose_reading_fails(path: Path, tmp_path: Path, name: str) -> None:
    """They can be opened. A parser that fails has its file opened again, to look for the cause."""
    edited(path, tmp_path)
    modules = [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(
        ValueError, match=rf"{name} cannot be read \(Input/output error\); replace or remove it"
    ):
        random_llm(tmp_path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"],
)
def test_git_lfs_pointer(path: Path, tmp_path: Path, name: str) -> None:
    edited(path, tmp_path)
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(ValueError, match=f"{name} is a git-lfs pointer.*'git lfs pull'"):
        random_llm(tmp_path)


BROKEN = ["", "{", "[]", "null", "[" * 100_000, "\xff", POINTER]


@pytest.mark.parametrize("text", [*BROKEN, "{}"], ids=lambda text: text[:8])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_tokenizer(path: Path, tmp_path: Path, name: str, text: str) -> None:
    shutil.copytree(find_checkpoint("qwen3-nano"), tmp_path, dirs_exist_ok=True)
    if name == "tokenizer_config.json" and text == "{}":
        text = '{"tokenizer_class": 3}'
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=name):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"model_max_length": "x"}, "config.json: model_max_length must be a number, not 'x'"),
        ({"model_max_length": [512]}, r"model_max_length must be a number, not \[512\]"),
        ({"tokenizer_class": "LayoutLMv3Tokenizer"}, "tokenizer_class 'LayoutLMv3Tokenizer'"),
        ({"tokenizer_class": "CLIPTokenizer"}, "tokenizer_class 'CLIPTokenizer' .*Unk token"),
        ({"tokenizer_class": "T5Tokenizer"}, "tokenizer_class 'T5Tokenizer' .*tokenizer=..."),
    ],
    ids=str,
)
def test_a_tokenizer_that_cannot_encode(tmp_path: Path, fields: dict, word: str) -> None:
    """They were loaded, and requests failed, some with an error that was wrong."""
    for file in find_checkpoint("qwen3-nano").iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = tmp_path / "tokenizer_config.json"
    text = json.dumps(json.loads(config.read_text()) | fields)
    config.unlink()
    config.write_text(text)
    with pytest.raises(ValueError, match=word):
        LLM(str(tmp_path))


# ---- files that cannot be read, sizes that cannot be allocated, values that are none ----

KINDS = ["directory", "dangling link", "loop of links", "FIFO", "no permission"]
FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """A FIFO is not opened, which would wait for a writer."""
    for file in find_checkpoint("qwen3-nano").iterdir():
        (tmp_path / file.name).symlink_to(file)
    path, open_path = tmp_path / name, Path.open
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "loop of links":
        path.symlink_to(name)
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.write_text("{}")
        refusal = PermissionError(13, "Permission denied")

        def refuse(opened: Path, *args: object, **kwargs: object) -> object:
            if opened == path:
                raise refusal
            return open_path(opened, *args, **kwargs)

        # Not by chmod, because root may read every file.
        monkeypatch.setattr(Path, "open", refuse)

    def waited(number: int, frame: object) -> None:
        raise TimeoutError("a file was opened that never ends")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(60)
    try:
        with pytest.raises(
            ValueError, match=rf"{name} cannot be read \(.+\); replace or remove it"
        ):
            LLM(str(tmp_path))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if name == "model.safetensors":  # random weights do not need it
        LLM(str(tmp_path), load_format="dummy", num_kvcache_blocks=8)


def test_a_package_in_a_zip_file(tmp_path: Path) -> None:
    package = Path(nanovllm.__file__).parent
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as file:
        for path in package.rglob("*.py"):
            file.write(path, path.relative_to(package.parent))
    code = "import nanovllm; print(nanovllm.__file__); nanovllm.LLM()"
    done = fresh.run(code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "package.zip"))
    assert "package.zip" in done.stdout
    assert re.search("ValueError: .*is not a directory; pip install the package", done.stderr)


SIZES = [
    ({"max_num_seqs": 10**9}, "max_num_seqs must be between 1 and 1048576"),
    ({"max_num_seqs": 10**20}, "max_num_seqs must be between 1 and 1048576"),
    ({"kvcache_block_size": 10**12}, "kvcache_block_size must be between 1 and 1048576"),
    ({"kvcache_block_size": 2**20, "num_kvcache_blocks": 10**5}, "lower .*kvcache_block_size"),
    ({"num_kvcache_blocks": 10**9}, r"a KV cache of [\d,]+ bytes .* lower num_kvcache_blocks"),
    ({"num_kvcache_blocks": 10**20}, r"a KV cache of [\d,]+ bytes .* lower num_kvcache_blocks"),
    ({"num_kvcache_blocks": None, "kv_cache_memory_bytes": 10**25}, "lower .*_memory_bytes"),
    ({"device": "cuda:99999999999999999999"}, "device must be"),
]


@pytest.mark.parametrize(("options", "word"), SIZES, ids=str)
def test_sizes_that_cannot_be_allocated(
    path: Path, monkeypatch: pytest.MonkeyPatch, options: dict, word: str
) -> None:
    """Refused before the weights are loaded."""
    monkeypatch.setattr(start, "load_model", None)
    with pytest.raises(ValueError, match=word):
        random_llm(path, **options)


def test_advice_for_a_cache_that_does_not_fit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it names no option that has an effect on a GPU only."""
    monkeypatch.setattr(memory, "available_host_memory", lambda: 64 << 20)
    with pytest.raises(ValueError, match="block and the null block need .* MiB. Lower") as error:
        random_llm(path, kvcache_block_size=2**20, num_kvcache_blocks=None)
    assert str(error.value).endswith("Lower kvcache_block_size, or end other programs")


@pytest.mark.parametrize("part", ["Rows", "load_model"])
def test_other_parts_that_cannot_be_allocated(
    path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory") if part == "Rows" else MemoryError

    monkeypatch.setattr(start, part, fail)
    with pytest.raises(ValueError, match="out of memory; lower max_num_seqs, max_model_len or"):
        random_llm(path)


def test_models_that_no_file_system_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a" * 5000, "/" + "a/" * 5000, "./a\0b"):
        with pytest.raises(ValueError, match="there is no directory"):
            LLM(name)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(ValueError, match="there is no directory"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize("value", [np.array([1, 2]), np.array([]), torch.ones(2), [np.ones(2)]])
@pytest.mark.parametrize("option", ["rope_scaling", "logits_processors", "hf_overrides"])
def test_arrays_as_options(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option}=.* is not supported"):
        EngineConfig.from_options({option: value})


@pytest.mark.parametrize("dtype", ["os.system", "auto", "int8", "torch", ""])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_stored_dtypes_that_are_none(path: Path, tmp_path: Path, field: str, dtype: str) -> None:
    names = {"dtype": None, "torch_dtype": None, field: dtype}
    with pytest.raises(
        ValueError, match=rf"config\.json: {field} must be one of float32, bfloat16"
    ):
        random_llm(edited(path, tmp_path, **names))


def test_penalty_that_overflows(llm: LLM) -> None:
    for penalty in (1e-38, 0.0099):
        with pytest.raises(ValueError, match=r"repetition_penalty must be 0\.01 or more"):
            SamplingParams(repetition_penalty=penalty)
    params = SamplingParams(repetition_penalty=0.01, temperature=0, max_tokens=3, ignore_eos=True)
    # The least penalty prefers the tokens of the prompt, and not token 0.
    tokens = llm.generate([5, 6, 7], params, use_tqdm=False)[0]["token_ids"]
    assert set(tokens) <= {5, 6, 7}


@pytest.mark.parametrize("do_sample", [True, False, None])
def test_generation_config_is_checked_also_if_it_is_greedy(
    tmp_path: Path, do_sample: bool | None
) -> None:
    for field, wrong in (
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-38),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", "a"),
        ("min_p", 2),
        ("max_new_tokens", 0),
        ("min_new_tokens", -1),
    ):
        text = json.dumps({"do_sample": do_sample, field: wrong, "eos_token_id": 0})
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"generation_config\.json: {field} must be"):
            Checkpoint(tmp_path).generation_defaults()
    fields = {"do_sample": do_sample, "temperature": 0.7, "top_k": None, "min_new_tokens": 0}
    text = json.dumps(fields | {"eos_token_id": 0})
    (tmp_path / "generation_config.json").write_text(text)
    temperature = 0.7 if do_sample else 0.0
    _, got = Checkpoint(tmp_path).generation_defaults()
    assert got == SamplingParams(temperature=temperature)


def test_harmless_sliding_window(path: Path, tmp_path: Path) -> None:
    slides = {"use_sliding_window": True, "layer_types": None, "max_window_layers": 1}
    random_llm(edited(path, tmp_path, **slides, sliding_window=512))
    random_llm(edited(path, tmp_path, **slides, sliding_window=64), max_model_len=64)
    nowhere = {**slides, "max_window_layers": 2}  # of two layers, none slides
    random_llm(edited(path, tmp_path, **nowhere, sliding_window=64))


def test_broken_json(path: Path, tmp_path: Path) -> None:
    edited(path, tmp_path)
    for text, word in (
        ("[1]", "must hold an object"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=word):
            random_llm(tmp_path)


def test_directories(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no directory './missing'"):
        LLM("./missing")
    with pytest.raises(ValueError, match="no directory 'qwen3-nan'.*'qwen3-nano'"):
        LLM("qwen3-nan")
    with pytest.raises(ValueError, match="is a file"):
        LLM(str(path / "config.json"))
    with pytest.raises(TypeError, match="model"):
        LLM(3)
    with pytest.raises(ValueError, match="empty"):
        LLM("")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        LLM(str(empty))
    (empty / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        LLM(str(empty))
    (empty / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        random_llm(empty)
    (empty / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(ValueError, match=r"only pickle weights \(pytorch_model\.bin\)"):
        random_llm(empty)
    (empty / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        random_llm(empty)
    (empty / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    with pytest.raises(ValueError, match=r"missing files: x\.safetensors"):
        random_llm(empty)


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def offline(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"no route to host.*HF_ENDPOINT.*HF_HOME"):
        LLM("Qwen/Qwen3-0.6B")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="not a valid hub id"):
        LLM("what is/this?")


def test_a_broken_chat_template_and_token_ids_of_three_dimensions(embedded: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    for template in ("{% if %}", "{{ raise_exception('no such role') }}"):
        with pytest.raises(ValueError, match="the chat template cannot render.*chat_template="):
            embedded.chat(chat, chat_template=template, use_tqdm=False)
    for ids in (np.zeros((1, 1, 3), int), torch.zeros(2, 2, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"token ids have one dimension.*\(\d, \d, 3\)"):
            embedded.generate(ids, use_tqdm=False)


# ---- attention masks, chat templates, ids of requests ----

MASKS = [
    ([5, 6], [1]),
    ([5, 6], [1, 0, 1]),
    ([5, 6], [[1, 1]]),
    ([5, 6], torch.ones(1, 2)),
    ([5, 6], 1),
    ([5, 6], "11"),
    ([[5, 6], [7, 8]], [1, 1]),
    ([[5, 6], [7, 8]], [[1, 1]]),
    ([[5, 6], [7, 8]], [[1, 1], [1]]),
    (np.array([[5, 6], [7, 8]]), np.ones((2, 3), int)),
    (torch.tensor([5, 6]), torch.ones(3)),
    ([[5, 6], [7]], [[1, 1], [1, 0]]),
    (None, [1]),
]


@pytest.mark.parametrize(("ids", "mask"), MASKS, ids=str)
def test_masks_of_another_shape(llm: LLM, ids: object, mask: object) -> None:
    """They removed tokens without a word, or raised an error of itertools."""
    prompt = {"input_ids": ids, "attention_mask": mask}
    for prompts in (prompt, [prompt, [5]]):
        with pytest.raises(ValueError, match="attention_mask must have the shape of input_ids"):
            llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
    still_serves(llm)


@pytest.mark.parametrize("value", [2, -1, 0.5, NAN, None, "1"])
def test_masks_of_other_values(llm: LLM, value: object) -> None:
    prompt = {"input_ids": [[5, 6]], "attention_mask": [[1, value]]}
    with pytest.raises(ValueError, match=f"attention_mask must hold 1, or 0 .* not {value!r}"):
        llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)
    still_serves(llm)


TEMPLATES = [
    ("{{ 1/0 }}", "ZeroDivisionError"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{% include 'x' %}", "no loader"),
    ("{% extends 'x' %}", "no loader"),
    ("{% for i in range(1000000000000) %}{% endfor %}", "Range too big"),
    ("{{ 'a' + 1 }}", "TypeError"),
    ("{{ 'a' * 100000000000000 }}", "MemoryError"),
    ("{{ messages[0].no.such }}", "UndefinedError"),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{{ 10 ** 10 ** 9 }}", "the operator .* is not accepted"),
    ("{% macro f(n) %}{% endmacro %}{{ f(1, **{'n': 2}) }}", "TypeError"),
    ("{% for i in range(70) %}{{ 'a' * 1000000 }}{% endfor %}", "more than 67108864 characters"),
]


@pytest.mark.parametrize(("template", "word"), TEMPLATES, ids=str)
def test_chat_templates_that_fail(embedded: LLM, template: str, word: str) -> None:
    for content in ("hi", [{"type": "text", "text": "hi"}]):
        chat = [{"role": "user", "content": content}]
        with pytest.raises(ValueError, match=f"the chat template cannot .*{word}") as error:
            embedded.chat(chat, chat_template=template, use_tqdm=False)
        assert str(error.value).endswith(f"chat_template=..., not {template!r}")
    still_serves(embedded)


def test_chat_templates_of_another_type(embedded: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    for template in (5, b"{{ 1 }}", Path("a.jinja"), ["{{ 1 }}"]):
        with pytest.raises(TypeError, match=re.escape(f"must be a string, not {template!r}")):
            embedded.chat(chat, chat_template=template, use_tqdm=False)
    still_serves(embedded)


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "{% set s = namespace(x=3) %}{% for i in range(99999) %}{% set s.x = s.x * s.x %}{% endfor %}",
]


@pytest.mark.parametrize("template", ENDLESS)
@pytest.mark.parametrize("content", ["hi", [{"type": "text", "text": "hi"}]], ids=["text", "parts"])
def test_chat_templates_that_do_not_end(
    embedded: LLM, monkeypatch: pytest.MonkeyPatch, template: str, content: object
) -> None:
    """A limit of time stops them: no thread is left."""
    monkeypatch.setattr("nanovllm.api.chat.MAX_SECONDS", 1)
    chat = [{"role": "user", "content": content}]
    ways = [{"chat_template": template}, {"chat_template_kwargs": {"chat_template": template}}]
    for options in ways:
        with pytest.raises(ValueError, match="chat_template=.* takes more than 1 seconds; end its"):
            embedded.chat(chat, use_tqdm=False, **options)
    for thread in threading.enumerate():
        if thread.name == "nanovllm limited":
            thread.join(100)
            assert not thread.is_alive()
    [out] = embedded.chat(chat, use_tqdm=False, chat_template="a **{{ messages[0].role }}**")
    assert out.prompt == "a **user**"
    still_serves(embedded)


def test_ctrl_c_ends_a_chat_template(embedded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox limits a range to 100,000, but not loops in loops."""
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            embedded.chat([{"role": "user", "content": "hi"}], chat_template=template)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    still_serves(embedded)


def test_ids_of_aborted_requests(llm: LLM) -> None:
    engine = llm.engine
    for ids in ("a", ["a"], ("a", "unknown"), {"a": 1}.keys(), iter(["a", "b"])):
        for name in "abc":
            engine.add_request([5, 6], SamplingParams(max_tokens=4), name)
        engine.abort_request(ids)
        left = {"b", "c"} if not hasattr(ids, "__next__") else {"c"}
        assert engine.outputs.requests.keys() == left
        for wrong in (5, None, b"c", [5], ["c", 5], [["c"]]):
            with pytest.raises(TypeError, match="must be a string or a list of strings, not"):
                engine.abort_request(wrong)
        assert engine.outputs.requests.keys() == left
        engine.abort_request(["b", "c"])
    still_serves(llm)


POOLING = [
    ({"dimensions": 0}, ValueError, "dimensions must be at least 1"),
    ({"dimensions": 65}, ValueError, "dimensions=65 is more than the 64 of the model"),
    ({"dimensions": 2.0}, TypeError, "dimensions must be an int"),
    ({"dimensions": True}, TypeError, "dimensions must be an int"),
    ({"normalize": 1}, TypeError, "normalize must be True or False"),
    ({"use_activation": "no"}, TypeError, "use_activation must be True or False"),
    ({"normalize": True, "use_activation": False}, ValueError, "two names of one field"),
    ({"prompt_name": 3}, TypeError, "prompt_name must be a string"),
    ({"prompt_name": "query"}, ValueError, "no prompt named 'query'; it has none"),
    ({"dimension": 3}, TypeError, "dimension"),
]


@pytest.mark.parametrize(("fields", "error", "word"), POOLING, ids=str)
def test_pooling_params(llm: LLM, fields: dict, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        llm.embed([[1]], PoolingParams(**fields), use_tqdm=False)
    if "use_activation" not in fields:
        with pytest.raises(error, match=word):
            llm.embed([[1]], use_tqdm=False, **fields)
    still_serves(llm)


@pytest.mark.parametrize(
    ("prompt", "error", "word"),
    [*(case for case in PROMPTS if "max_model_len" not in case[2] and case[2] != "10")],
    ids=lambda x: str(x)[:30],
)
def test_prompts_of_embeddings_and_scores(
    llm: LLM, prompt: object, error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        llm.embed(prompt, use_tqdm=False)
    with pytest.raises(error):
        llm.loglikelihood(prompt, [[3], [4]], use_tqdm=False)
    with pytest.raises((TypeError, ValueError)):
        llm.loglikelihood([[3]], prompt, use_tqdm=False)
    still_serves(llm)


CALLS = [
    (lambda llm: llm.embed([[1]], SamplingParams()), TypeError, "pooling_params must be a Pooling"),
    (lambda llm: llm.embed([[1]], {"dimensions": 3}), TypeError, "pooling_params must be a Pooli"),
    (lambda llm: llm.embed([[1]], [PoolingParams()] * 2), ValueError, "1 prompts but 2 pooling_pa"),
    (lambda llm: llm.embed([[1]], PoolingParams(), dimensions=3), TypeError, "or pass them alone"),
    (lambda llm: llm.embed([[1]], lora_request=3), ValueError, "lora_request=3 is not supported"),
    (lambda llm: llm.embed([[1]], use_tqmd=False), TypeError, "did you mean 'use_tqdm'"),
    (lambda llm: llm.embed([[1] * 161]), ValueError, "takes 11 KV blocks of 16; the cache has 10"),
    (lambda llm: llm.generate([[1]], PoolingParams()), TypeError, "must be a SamplingParams"),
    (lambda llm: next(llm.stream([[1]], PoolingParams())), TypeError, "must be a SamplingParams"),
    (lambda llm: next(llm.stream([[1], [VOCAB]])), ValueError, r"prompts\[1\]: token id"),
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
    (lambda llm: llm.score("a", "b"), AttributeError, "use loglikelihood"),
]


@pytest.mark.parametrize(("call", "error", "word"), CALLS)
def test_calls_of_embed_and_loglikelihood(
    llm: LLM, call: Callable, error: type[Exception] | None, word: str
) -> None:
    if error is None:
        assert call(llm) == []
    else:
        with pytest.raises(error, match=word):
            call(llm)
    still_serves(llm)


def test_continuations_that_add_no_token(embedded: LLM) -> None:
    for prompt, end, word in (
        ("a", "", "the continuation is empty"),
        (" ", "b", "the prompt is empty"),
        ("", "b", "the prompt is empty"),
    ):
        with pytest.raises(ValueError, match=word):
            embedded.loglikelihood(prompt, end)
    still_serves(embedded)


SETTINGS = [
    ("modules.json", "{}", "modules.json is not valid: it must hold a list, not dict"),
    ("modules.json", "[3]", "a module needs a 'type'"),
    ("modules.json", "[", "modules.json is not valid JSON"),
    ("config_sentence_transformers.json", "[]", "it must hold an object, not list"),
    ("config_sentence_transformers.json", '{"prompts": []}', "prompts must be an object"),
    ("config_sentence_transformers.json", '{"prompts": {"a": 3}}', "a prompt must be a string"),
    ("config_sentence_transformers.json", '{"truncate_dim": 0}', "truncate_dim must be"),
    ("config_sentence_transformers.json", '{"default_prompt_name": "a"}', "is none of the prompts"),
]


@pytest.mark.parametrize(("name", "text", "word"), SETTINGS)
def test_broken_pooling_settings(
    path: Path, tmp_path: Path, name: str, text: str, word: str
) -> None:
    edited(path, tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=word):
        random_llm(tmp_path)
