"""An engine that has slept answers as before, and returns memory while it sleeps."""

import gc
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import fresh
import pytest
import torch
from checkpoints import make_checkpoint, random_llm
from graphs import capture_with, stand_in
from weights import MODELS, OPTIONS, PARAMS, answers, pair

CASES = [*zip(MODELS, OPTIONS, strict=True), ("qwen3", "int8"), ("hybrid", "bfloat16")]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_tokens_are_equal_after_sleep(kind: str, options: str, tmp_path) -> None:
    """With a prefix cache that is full before each sleep."""
    (path, model), (other, _) = pair(kind, tmp_path)
    llm = random_llm(path, num_kv_cache_blocks=20, **OPTIONS[options])
    before = answers(llm)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.load_weights(other)
            answers(llm)
            llm.load_weights(model.state_dict())
        tokens, logprobs = answers(llm)
        assert tokens == before[0]
        assert torch.equal(logprobs, before[1])


def test_twenty_times(path: Path) -> None:
    """Also of an engine that was made in inference mode, and with calls in it."""
    with torch.inference_mode():
        llm = random_llm(path, swap_space=2**-9, num_kv_cache_blocks=20)
    before = answers(llm)
    llm.load_weights(path)
    for i in range(20):
        with torch.inference_mode(i % 3 == 0):
            llm.sleep(1 + i % 2)
            llm.wake_up()
            llm.load_weights(path)
        assert answers(llm)[0] == before[0]


def test_captured_steps_are_captured_again(path: Path, monkeypatch) -> None:
    capture_with(monkeypatch, stand_in)
    options = dict(attention_backend="sdpa", max_num_seqs=4, max_model_len=64)
    llm = random_llm(path, **options)
    before = answers(llm)
    for level in (1, 2):
        captured = weakref.ref(llm.engine.runner.graphs)
        llm.sleep(level)
        assert captured() is None
        llm.wake_up()
        if level == 2:
            llm.load_weights(path)
        assert llm.engine.runner.graphs is not None
        assert answers(llm)[0] == before[0]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("options", ["torch", "torch int4"])
def test_tensors_are_all_weights(kind: str, options: str, tmp_path, monkeypatch) -> None:
    """A model with a copy of them answers as before. What a GPU's level 1 does."""
    MODELS[kind](tmp_path, 0)
    llm = random_llm(tmp_path, **OPTIONS[options])
    before, runner = answers(llm), llm.engine.runner
    model: Any = runner.model

    def filled(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, 99, dtype=dtype or model.backend.dtype)

    with monkeypatch.context() as patch:
        patch.setattr(model.backend, "empty", filled)
        new = type(model)(model.config, model.rotary.max_len, model.backend)
    for tensor, value in zip(new.tensors(), model.tensors(), strict=True):
        tensor.copy_(value)
    runner.model = runner.fused_model = new
    llm.reset_prefix_cache()
    tokens, logprobs = answers(llm)
    assert tokens == before[0]
    assert torch.equal(logprobs, before[1])


@pytest.mark.parametrize("level", [1, 2])
def test_calls_are_refused(path: Path, level: int, tmp_path) -> None:
    llm = random_llm(path)
    before = answers(llm)
    llm.save_prefix_cache(tmp_path)
    runner = llm.engine.runner
    freed = [weakref.ref(runner.attention)] + [weakref.ref(runner.model)] * (level == 2)
    del runner
    llm.sleep(level)
    assert [reference() for reference in freed] == [None] * level
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate([[1, 2]]),
        lambda: [*llm.stream([[1, 2]])],
        lambda: llm.embed([[1, 2]]),
        lambda: llm.engine.add_request([1, 2]),
        lambda: llm.load_prefix_cache(tmp_path),
        lambda: llm.save_prefix_cache(tmp_path),
        lambda: llm.load_weights(path),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="the engine sleeps; call wake_up first"):
            call()
    llm.sleep(level)
    with pytest.raises(RuntimeError, match=f"sleeps at level {level}; call wake_up before sleep"):
        llm.sleep(3 - level)
    assert llm.stats()["waiting"] == llm.stats()["blocks_evictable"] == 0
    llm.wake_up()
    if level == 2:
        for call in (*calls[:6], lambda: llm.sleep()):
            with pytest.raises(RuntimeError, match="incomplete, after sleep.level=2. or"):
                call()
        with pytest.raises(ValueError, match="missing: embed_tokens.weight"):
            llm.load_weights({})
        llm.load_weights(path)
    llm.wake_up()  # does nothing
    assert answers(llm)[0] == before[0]


def test_what_cannot_sleep(path: Path) -> None:
    llm = random_llm(path)
    for level, error in ((3, ValueError), (True, TypeError)):
        with pytest.raises(error, match=f"level must be .*, not {level}"):
            llm.sleep(level)
    for tags in (["weights", "kv"], "weights", 3, [[]]):
        with pytest.raises(ValueError, match="tags must be None or a list of weights and kv_cache"):
            llm.wake_up(tags=tags)
    stream = llm.stream([[1, 2, 3]], PARAMS)
    next(stream)
    with pytest.raises(RuntimeError, match="while requests run"):
        llm.sleep()
    stream.close()
    llm.sleep()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("first", ["weights", "kv_cache"])
def test_parts_that_wake_up_one_after_the_other(
    path: Path, level: int, first: str, tmp_path
) -> None:
    llm = random_llm(path)
    before, weights = answers(llm), make_checkpoint(tmp_path, seed=1).state_dict()
    for _ in range(2):
        llm.sleep(level)
        for _ in range(2):
            llm.wake_up(tags=[first])
            llm.wake_up(tags=[first])
            last = "kv_cache" if first == "weights" else "weights"
            asleep = rf"the engine's (KV cache|weights) sleeps?; call wake_up\(tags=\['{last}'\]\)"
            with pytest.raises(RuntimeError, match=asleep):
                llm.generate([[1, 2]])
            if first == "weights":
                llm.load_weights(weights)
                llm.load_weights(path)
            else:
                with pytest.raises(RuntimeError, match=asleep):
                    llm.load_weights(path)
            llm.sleep(level)
        llm.wake_up(tags=[first])
        if first == "weights" and level == 2:
            llm.load_weights(path)
        llm.wake_up(tags=[last])
        if first == "kv_cache" and level == 2:
            with pytest.raises(RuntimeError, match="incomplete, after sleep"):
                llm.generate([[1, 2]])
            llm.load_weights(path)
        assert answers(llm)[0] == before[0]


@pytest.mark.parametrize("level", [1, 2])
def test_ctrl_c_at_any_line(path: Path, level: int) -> None:
    llm = random_llm(path)
    before = answers(llm)

    def calls() -> None:
        llm.sleep(level)
        llm.wake_up(tags=["weights"])
        llm.load_weights(path)
        llm.wake_up()

    calls()  # imports the modules, whose lines run only once and would be counted
    gc.freeze()  # each sleep collects garbage, and need not look at what other tests have left
    lines = faults.run(
        calls, files := ("features/weights/sleep.py", "features/weights/new_weights")
    )
    for at in faults.each_line(lines):
        with pytest.raises(KeyboardInterrupt):
            faults.run(calls, files, at, lambda: signal.raise_signal(signal.SIGINT))
        calls()
        assert answers(llm)[0] == before[0]


def test_a_request_that_was_checked_before(path: Path, monkeypatch) -> None:
    """It is refused when it is queued, and leaves nothing."""
    llm = random_llm(path)
    add = llm.engine.add

    def add_late(requests: Any) -> None:
        llm.sleep()
        add(requests)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "add", add_late)
        with pytest.raises(RuntimeError, match="the engine sleeps"):
            llm.generate([[1, 2]], use_tqdm=False)
    llm.wake_up()
    assert llm.stats()["waiting"] == llm.stats()["running"] == 0
    answers(llm)


MEMORY = """
import psutil, torch
from nanovllm import LLM, SamplingParams
options = dict(device="cpu", dtype="float32", skip_tokenizer_init=True, num_kv_cache_blocks=200)
llm = LLM({path!r}, block_size=64, **options)
params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

def answer_and_fill_the_cache():
    llm.generate([[1] * 20], params, use_tqdm=False)
    with torch.inference_mode():
        llm.engine.runner.attention.cache.fill_(1)

answer_and_fill_the_cache()
runner = llm.engine.runner
cache = runner.attention.cache.nbytes
weights = sum(linear.weight.shape.numel() * 4 for linear in runner.model.linears())
del runner
found = []
for level in (1, 2):
    before = psutil.Process().memory_info().rss
    llm.sleep(level)
    found.append(before - psutil.Process().memory_info().rss)
    llm.wake_up()
    if level == 2:
        llm.load_weights({path!r})
    answer_and_fill_the_cache()
print(cache, weights, *found)
"""


@pytest.mark.slow
def test_the_memory_of_the_process_falls(large: Path) -> None:
    done = fresh.run(MEMORY.format(path=str(large)))
    assert done.returncode == 0, done.stderr
    cache, weights, first, second = map(int, done.stdout.split())
    assert first > 0.8 * cache
    assert second > 0.8 * (cache + weights)
