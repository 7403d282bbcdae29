"""The methods of LLM: order, defaults, samples, streams, the progress bar, threads, two engines."""

import gc
import itertools
import re
import weakref
from pathlib import Path

import pytest
import torch
from checkpoints import random_llm
from engines import is_idle, still_serves

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_defaults(embedded: LLM, llm: LLM) -> None:
    assert embedded.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=256)
    assert SamplingParams() == SamplingParams(temperature=1.0, max_tokens=64)
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.get_tokenizer()
    with pytest.raises(ValueError, match=r"prompts\[0\]: the engine has no tokenizer"):
        llm.generate(["a", "b", [1]], use_tqdm=False)


def test_progress_bar(embedded: LLM, capsys) -> None:
    embedded.generate(["1 + 1\n", "2 + 2\n"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "prompt" in shown
    assert "tok/s" in shown
    embedded.generate("1 + 1\n", GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_progress_bar_counts_its_own_requests(path: Path, capsys, monkeypatch) -> None:
    llm = random_llm(path)
    # A clock that counts how often it is read, in milliseconds, so that the rates are large.
    monkeypatch.setattr("nanovllm.llm.time.monotonic", itertools.count(0, 1e-3).__next__)
    other = llm.engine.add_request([9] * 100, SamplingParams(max_tokens=400, ignore_eos=True))
    llm.generate([1, 2, 3, 4], GREEDY)
    shown = capsys.readouterr().err.splitlines()[-1]
    prompt, output = (
        float(re.search(rf"{name} ([\d,]+) tok/s", shown)[1].replace(",", ""))
        for name in ("prompt", "output")
    )
    assert "1/1" in shown
    assert output / prompt == pytest.approx(8 / 4, rel=0.1)
    llm.engine.abort_request(other)
    # A prompt in several steps, each of which is shown.
    monkeypatch.setattr("nanovllm.llm.time.monotonic", itertools.count(0, 0.2).__next__)
    random_llm(path, max_num_batched_tokens=32).generate([5] * 150, GREEDY)
    rates = re.findall(r"prompt ([\d,]+) tok/s", capsys.readouterr().err)
    assert len(rates) > 10
    assert "0" not in rates


def test_two_engines_and_deletion(path: Path) -> None:

    first, second = random_llm(path), random_llm(path)
    a = first.generate([1, 2, 3], GREEDY, use_tqdm=False)
    cache = weakref.ref(first.engine.runner.attention.cache)
    del first
    gc.collect()
    assert cache() is None
    assert a[0]["token_ids"] == second.generate([1, 2, 3], GREEDY, use_tqdm=False)[0]["token_ids"]


@pytest.mark.parametrize("backend", ["sdpa", "numba"])
def test_torch_defaults_of_the_program_change_nothing(path: Path, backend: str) -> None:
    if backend == "numba":
        pytest.importorskip("numba")
    prompt, outputs = list(range(1, 9)), []
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, repetition_penalty=1.1)
    try:
        for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "meta")):
            torch.set_default_dtype(dtype)
            torch.set_default_device(device)
            llm = random_llm(path, attention_backend=backend)
            outputs.append(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0])
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].cumulative_logprob == outputs[1].cumulative_logprob


def test_a_stream_checks_its_prompts_before_the_loop(llm: LLM) -> None:
    for prompts, error in ((5, TypeError), ([[]], ValueError), ([10**6], ValueError)):
        with pytest.raises(error):
            llm.stream(prompts)
    with pytest.raises(TypeError, match="must be a SamplingParams"):
        llm.stream([[1]], 5)
    llm.stream([[1]])  # adds no request before the loop
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.slow
def test_n_samples(path: Path) -> None:
    """Distinct, in order of index, each what its seed gives; one greedy answer n times."""
    llm = random_llm(path, num_kv_cache_blocks=200)
    params = SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    out = llm.generate([[1] * 21, [2] * 40], params, use_tqdm=False)
    for o in out:
        assert [c.index for c in o.outputs] == list(range(5))
        assert len({tuple(c.token_ids) for c in o.outputs}) == 5
    first = llm.generate(
        [1] * 21,
        SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True),
        use_tqdm=False,
    )
    assert first[0]["token_ids"] == out[0]["token_ids"]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want = llm.generate([1] * 21, greedy, use_tqdm=False)[0]["token_ids"]
    many = SamplingParams(n=4, temperature=0, max_tokens=12, ignore_eos=True)
    got = llm.generate([1] * 21, many, use_tqdm=False)[0]
    assert [c.token_ids for c in got.outputs] == [want] * 4
    other = random_llm(path, num_kv_cache_blocks=4, max_num_seqs=2)
    again = other.generate([1] * 21, params, use_tqdm=False)[0]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in out[0].outputs]
    assert is_idle(other.engine)


def test_lists_of_unequal_length(small_llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts but 3 sampling_params"):
        small_llm.generate([[1], [2]], [SamplingParams()] * 3)
    with pytest.raises(TypeError, match="SamplingParams"):
        small_llm.generate([[1], [2]], {"temperature": 1})
    with pytest.raises(TypeError, match="SamplingParams"):
        small_llm.generate([[1], [2]], [SamplingParams(), 0.5])
    still_serves(small_llm)


def test_stream_is_generate_in_pieces(embedded: LLM) -> None:
    questions = ["Count from 5 to 20", "Reverse wolf", "What is a block?", "What is 3 + 4?"]
    tokenizer = embedded.get_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False
        )
        for q in questions
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=99),
        SamplingParams(temperature=0.5, seed=2, max_tokens=20, n=3, logprobs=2),
        SamplingParams(temperature=0, max_tokens=99, stop=["the KV", "zebra"]),
        SamplingParams(temperature=0, max_tokens=99, logprobs=1, prompt_logprobs=1),
    ]
    want = embedded.generate(prompts, params, use_tqdm=False)
    texts: dict[tuple[int, int], str] = {}
    tokens: dict[tuple[int, int], list[int]] = {}
    ended: dict[tuple[int, int], str] = {}
    logprobs: dict[tuple[int, int], list] = {}
    in_prompt: list = []
    pieces = 0
    for new in embedded.stream(prompts, params):
        key = (new.request_index, new.index)
        assert key not in ended
        texts[key] = texts.get(key, "") + new.text
        tokens[key] = tokens.get(key, []) + new.token_ids
        if params[new.request_index].logprobs is None:
            assert new.logprobs is None
        else:
            assert len(new.logprobs) == len(new.token_ids)
            logprobs.setdefault(key, []).extend(map(list, new.logprobs))
        in_prompt += [new.prompt_logprobs] * (new.prompt_logprobs is not None)
        if new.finish_reason is not None:
            ended[key] = new.finish_reason
        pieces += 1
    assert pieces > 40
    for i, out in enumerate(want):
        for c in out.outputs:
            assert texts[i, c.index] == c.text
            assert tokens[i, c.index] == c.token_ids
            assert ended[i, c.index] == c.finish_reason
            assert logprobs.get((i, c.index)) == (c.logprobs and [*map(list, c.logprobs)])
    assert in_prompt == [want[3].prompt_logprobs]


def test_leaving_a_stream_frees_everything(embedded: LLM) -> None:
    for new in embedded.stream(["Count from 1 to 50\n"] * 3, SamplingParams(max_tokens=200)):
        if new.token_ids:
            break
    assert not embedded.engine.has_unfinished_requests()
    stats = embedded.stats()
    assert (stats["running"], stats["waiting"], stats["blocks_in_use"]) == (0, 0, 0)
    with pytest.raises(ValueError, match="empty"):
        next(embedded.stream(["fine", ""]))
    assert not embedded.engine.has_unfinished_requests()
