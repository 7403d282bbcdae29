"""The methods of LLMEngine: requests that are added, stepped and aborted, failing steps, resets."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import random_llm, weights_of
from engines import is_idle, still_serves
from fake_runner import greedy

from lessons.oracle.oracle import answer
from nanovllm import LLM, GenerationError, PoolingParams, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_manual_loop_and_abort(path: Path, asynchronous: bool) -> None:
    engine = random_llm(path, async_scheduling=asynchronous, max_num_seqs=2).engine
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    ids = [engine.add_request([i, i + 1], long, request_id=f"r{i}") for i in range(1, 6)]
    assert ids == ["r1", "r2", "r3", "r4", "r5"]
    with pytest.raises(ValueError, match="'r1' is in use"):
        engine.add_request([1], long, request_id="r1")
    engine.step()
    engine.abort_request("r1")  # running
    engine.abort_request("r4")  # waiting
    engine.abort_request("r1")
    engine.abort_request("never was")
    engine.abort_request([])
    finished = []
    while engine.has_unfinished_requests():
        finished += engine.step()
    assert sorted(o.request_id for o in finished) == ["r2", "r3", "r5"]
    assert all(len(o["token_ids"]) == 40 for o in finished)
    assert is_idle(engine)
    assert engine.step() == []


def test_stats_and_reset(path: Path) -> None:
    llm = random_llm(path, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for i in range(3):
        llm.engine.add_request([7] * 40 + [i], params)
    llm.engine.step()
    stats = llm.stats()
    assert (stats["running"], stats["waiting"]) == (2, 1)
    assert stats["blocks_in_use"] == 3 + 1  # two full blocks in common
    assert stats["blocks_in_use"] + stats["blocks_evictable"] + stats["blocks_free"] == 64
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    stats = llm.stats()
    assert (stats["running"], stats["waiting"], stats["blocks_in_use"]) == (0, 0, 0)
    assert stats["prefix_hit_rate"] == 2 * 32 / (3 * 41)
    assert stats["blocks_evictable"] > 0
    llm.reset_prefix_cache()
    assert llm.stats()["blocks_free"] == 64
    assert llm.generate([7] * 40, params, use_tqdm=False)[0].num_cached_tokens == 0


def test_ids_of_a_user_and_of_generate_do_not_meet(path: Path) -> None:
    llm = random_llm(path)
    llm.engine.add_request([9, 9], GREEDY, request_id="1")
    first = llm.generate([1], GREEDY, use_tqdm=False)[0]
    second = llm.generate([2], GREEDY, use_tqdm=False)[0]  # "1" is done, and not asked for yet
    assert (first.prompt_token_ids, second.prompt_token_ids) == ([1], [2])
    with pytest.raises(ValueError, match="'1' is in use"):
        llm.engine.add_request([1], GREEDY, request_id="1")
    with pytest.raises(TypeError, match="request_id"):
        llm.engine.add_request([1], GREEDY, request_id=["1"])
    assert [o.prompt_token_ids for o in llm.engine.step()] == [[9, 9]]
    assert is_idle(llm.engine)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_without_a_token_to_sample_ends_with_an_error(
    path: Path, asynchronous: bool
) -> None:
    """Its token is not in the output, the others go on, and the engine remains usable."""
    llm = random_llm(path, num_kv_cache_blocks=64, async_scheduling=asynchronous)

    def fails(value: float) -> Callable:
        def processor(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            return logits.fill_(value) if len(ids) == 3 else logits

        return processor

    greedy = dict(temperature=0, max_tokens=8, ignore_eos=True)
    plain = SamplingParams(**greedy)
    hidden = SamplingParams(**greedy, logprobs=3, logits_processors=[fails(float("-inf"))])
    broken = SamplingParams(**greedy, n=2, logits_processors=[fails(float("nan"))])
    prompts, params = [[1, 2], [3, 4], [5, 6]], [plain, hidden, broken]
    want = llm.generate(prompts, plain, use_tqdm=False)
    with pytest.raises(GenerationError, match=r"prompts\[1\].*prompts\[2\].*`outputs`") as caught:
        llm.generate(prompts, params, use_tqdm=False)
    outputs = caught.value.outputs
    assert outputs[0].outputs[0].token_ids == want[0].outputs[0].token_ids
    for i in (1, 2):
        for sample in outputs[i].outputs:
            assert sample.finish_reason == "error"
            assert sample.token_ids == want[i].outputs[0].token_ids[:3]
            assert i == 2 or len(sample.logprobs) == 3
    assert [out.finish_reason for out in llm.stream([3, 4], hidden)][-1] == "error"
    llm.reset_prefix_cache()
    again = llm.generate(prompts, plain, use_tqdm=False)
    assert [o["token_ids"] for o in again] == [o["token_ids"] for o in want]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_results_are_kept_if_a_logits_processor_raises(path: Path, asynchronous: bool) -> None:
    """The error has them; requests that had not finished have their output so far."""
    llm = random_llm(path, num_kv_cache_blocks=64, async_scheduling=asynchronous, max_num_seqs=3)

    def raises(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(ids) == 3:
            raise OSError("no such file")
        return logits

    greedy = dict(temperature=0, ignore_eos=True)
    params = [SamplingParams(**greedy, max_tokens=num) for num in (2, 8, 8, 8)]
    prompts = [[1, 2], [3, 4], [5, 6], [7, 8]]
    want = [out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)]
    params[1] = SamplingParams(**greedy, max_tokens=8, logprobs=3, logits_processors=[raises])
    with pytest.raises(OSError, match="no such file") as caught:
        llm.generate(prompts, params, use_tqdm=False)
    assert "`outputs`" in caught.value.__notes__[0]
    outputs = [out.outputs[0] for out in caught.value.outputs]
    assert [out.finish_reason for out in outputs] == ["length", "error", "abort", "abort"]
    for out, ids in zip(outputs, want, strict=True):
        assert out.token_ids == ids[: len(out.token_ids)]
    assert [len(out.token_ids) for out in outputs[:2]] == [2, 3]
    assert len(outputs[1].logprobs) == 3
    assert not llm.engine.has_unfinished_requests()
    params[1] = params[2]
    again = llm.generate(prompts, params, use_tqdm=False)
    assert [out["token_ids"] for out in again] == want


@pytest.mark.parametrize("swap", [{}, dict(swap_space=0.01)], ids=["", "swap"])
def test_a_reset_of_the_prefix_cache(path: Path, swap: dict) -> None:
    """It is refused while a request runs. After it, nothing is shared with earlier requests."""
    options = dict(num_kv_cache_blocks=12, block_size=16, attention_backend="sdpa")
    llm = random_llm(path, **options, **swap)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = [i % 90 + 1 for i in range(40)]
    want = llm.generate([prompt], params, use_tqdm=False)[0]["token_ids"]
    request = llm.engine.submit(prompt, params)
    llm.engine.run_step()
    before = llm.stats()
    assert llm.reset_prefix_cache() is False
    assert llm.stats() == before
    for _ in llm.engine.run([request]):
        pass
    assert request.output.outputs[0].token_ids == want
    assert request.output.num_cached_tokens == 32
    with torch.inference_mode():
        for weight in weights_of(llm).values():
            weight.mul_(1.1)
    assert llm.reset_prefix_cache() is True
    [got] = llm.generate([[*prompt, *want, 5]], params, use_tqdm=False)
    assert got.num_cached_tokens == 0


def test_the_order_of_vllms_add_request(small_llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"add_request\(prompt, sampling_params, request_id\)"):
        small_llm.engine.add_request("0", [1, 2], SamplingParams())
    with pytest.raises(TypeError, match=r"add_request\(prompt, sampling_params, request_id\)"):
        small_llm.engine.add_request("0", [1, 2], PoolingParams())
    still_serves(small_llm)


def test_ids_of_aborted_requests(small_llm: LLM) -> None:
    engine = small_llm.engine
    for ids in ("a", ["a"], ("a", "unknown"), {"a": 1}.keys(), iter(["a", "b"])):
        for name in "abc":
            engine.add_request([5, 6], SamplingParams(max_tokens=4), name)
        engine.abort_request(ids)
        left = {"b", "c"} if not hasattr(ids, "__next__") else {"c"}
        assert engine.requests.keys() == left
        with pytest.raises(TypeError):
            engine.abort_request(5)
        engine.abort_request(["b", "c"])
    still_serves(small_llm)


# ---- overlap: with async_scheduling, a step is launched before the last step's tokens are read ----

# On a fake runner: no model, but the oracle's memory, so that the answers must be right too.


def launched(step: int) -> list[tuple[str, int]]:
    return [("schedule", step), ("run", step)]


@pytest.mark.parametrize("overlap", [False, True])
def test_whether_the_next_step_is_launched_before_tokens_are_read(make, overlap: bool) -> None:
    llm, wanted = make(overlap), []
    llm.generate([[1, 2], [0]], greedy(max_tokens=4), use_tqdm=False)
    for step in range(4 + overlap):
        wanted += launched(step) if step < 4 else []
        wanted += [("wait", step - overlap)] if step >= overlap else []
    assert llm.engine.runner.events == wanted


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_found_late_costs_one_token(make, asynchronous: bool) -> None:
    """A stop token costs one token of that sequence, an end by length none. Outputs are equal."""
    prompts = [[i % 3, i // 3 % 3, i // 9] for i in range(8)]
    for ends in (frozenset({2}), frozenset()):
        llm = make(asynchronous)
        params = greedy(max_tokens=12, stop_token_ids=list(ends))
        outs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, out in zip(prompts, outs, strict=True):
            assert out["token_ids"] == answer(prompt, 15, ends, 3)
        # What the last token allowed ended is not found late: the scheduler knew that it would.
        early = sum(len(out["token_ids"]) < 12 for out in outs)
        assert early >= 5 if ends else early == 0
        wasted = sum(llm.engine.runner.drawn) - sum(len(out["token_ids"]) for out in outs)
        assert wasted == (early if asynchronous else 0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_abort_costs_one_token(make, asynchronous: bool) -> None:
    llm = make(asynchronous)
    engine = llm.engine
    gone, kept = (engine.add_request(p, greedy(max_tokens=9)) for p in ([1, 1], [2, 0]))
    outs, known = [], 0
    for step in itertools.count():
        if step == 4:
            known = engine.requests[gone].samples[0].seq.num_output
            engine.abort_request(gone)
        if not engine.has_unfinished_requests():
            break
        outs += engine.step()
    assert [out.request_id for out in outs] == [kept]
    assert outs[0]["token_ids"] == answer([2, 0], 11, frozenset(), 3)
    assert sum(engine.runner.drawn) - 9 - known == (1 if asynchronous else 0)
