"""Many requests in one call: work and memory are counted, because times depend on the machine."""

import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
from checkpoints import random_llm
from engines import is_idle

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.policies import HEAD, WaitingQueue
from nanovllm.engine.request import Progress, Request
from nanovllm.engine.sampling import read_stream
from nanovllm.engine.sequence import Sequence
from nanovllm.llm import show_progress
from nanovllm.plan import RowSampling
from tools.benchmarks.modes import NoModel, many

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def make_engine(**options: Any) -> LLMEngine:
    inputs = InputProcessor(None, 1000, 128, frozenset(), SamplingParams(), 0)
    return LLMEngine(EngineConfig(max_num_seqs=8, **options), NoModel(), inputs)


def add(engine: LLMEngine, count: int, call: Progress | None = None, **more: Any) -> list[Request]:
    requests: list[Request] = []
    pairs = [([i % 999, 7, 8, 9], PARAMS) for i in range(count)]
    engine.add(engine.input_processor.check(pairs), requests, call, **more)
    return requests


def work_of(function: Callable[[], Any]) -> int:
    """The number of instructions of Python that it runs."""
    number = 0

    def note(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal number
        number += 1
        frame.f_trace_opcodes = True
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        function()
    finally:
        sys.settrace(before)
    return number


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_step_does_as_much_with_many_waiting(policy: str, stream: bool) -> None:
    """Also the progress bar, the counters of `stats` and what a stream reads."""
    found = []
    for count in (100, 10_000):
        engine, call = make_engine(scheduling_policy=policy), Progress()
        steps = engine.run(add(engine, count, call, stream=stream))
        bar = Mock(n=0)

        def turn(
            engine: LLMEngine = engine, call: Progress = call, steps: Any = steps, bar: Any = bar
        ) -> None:
            next(steps)
            show_progress(bar, call, 1.0)
            engine.stats()
            for request in list(call.changed):
                read_stream(request, 0)
            call.changed.clear()

        for _ in range(4):  # the first requests end, and others take their rows in the next step
            turn()
        found.append(work_of(turn))
    few, many = found
    assert many <= 1.05 * few


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_ending_one_request_does_as_much_with_many_waiting(policy: str) -> None:
    found = []
    for count in (100, 10_000):
        engine = make_engine(scheduling_policy=policy)
        request = add(engine, count)[count // 2]
        found.append(work_of(lambda e=engine, r=request: e.abort([r])))
        assert request.output.outputs[0].finish_reason == "abort"
        assert engine.stats()["waiting"] == count - 1
    assert found[1] <= found[0] + 50


def test_progress_is_counted() -> None:
    """The counters are those of a pass over all requests, after each step and with aborts."""
    engine, call, other = make_engine(), Progress(), Progress()
    requests = add(engine, 40, call)
    add(engine, 5, other)
    for step, _ in enumerate(engine.run(requests)):
        if step == 3:
            engine.abort(requests[::7])
        started = [r for r in requests if r.metrics.first_token_time is not None]
        assert call.num_ended == sum(r.ended for r in requests)
        assert call.num_prompt_tokens == 4 * len(started)
        assert call.num_output_tokens == sum(r.num_output for r in requests)
    assert (call.num_ended, call.started) == (40, set())
    engine.abort_all()
    assert other.num_ended == 5
    assert is_idle(engine)


@pytest.mark.parametrize("n", [1, 3])
def test_waiting_sequences_are_counted(n: int) -> None:
    """`stats` has the numbers of a pass over all sequences, also with forks and aborts."""
    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=9, n=n, ignore_eos=True)
    requests = [engine.submit([i, 1, 2], params) for i in range(12)]
    for step, _ in enumerate(engine.run(requests)):
        if step == 2:
            engine.abort([requests[0], requests[-1]])
        stats = engine.stats()
        unfinished = sum(
            request.num_unfinished for request in engine.output_processor.requests.values()
        )
        assert stats["running"] + stats["waiting"] == unfinished
    assert engine.stats()["waiting"] == 0


def test_waiting_queue_is_a_sorted_list() -> None:
    """Sequences come and go in any order, also again; what is removed takes no memory for long."""
    rng, queue, expected = random.Random(0), WaitingQueue(), []
    seqs = [Sequence(str(i), i, [i], 1, 2, frozenset(), RowSampling(0, 0)) for i in range(200)]
    for _ in range(5000):
        seq, waiting = rng.choice(seqs), [entry[-1] for entry in expected]
        if seq in waiting:
            if rng.random() < 0.5:
                seq = waiting[0]
            queue.remove(seq)
            expected = [entry for entry in expected if entry[-1] is not seq]
        else:
            key = HEAD if rng.random() < 0.2 else rng.randrange(50)
            queue.add(seq, key)
            expected = sorted([*expected, (key, seq.arrival, seq.index, seq)])
        assert list(queue) == [entry[-1] for entry in expected]
        assert len(queue) == len(expected)
        assert not expected or queue.first is expected[0][-1]
        assert len(queue._heap) <= 2 * len(queue) + 1


def test_memory_of_waiting_requests() -> None:
    """Fewer than 2 kB each, of 20 tokens, in addition to what the caller has."""
    engine, count = make_engine(), 5000
    pairs: list[Any] = [(list(range(300, 320)), PARAMS)] * count
    requests: list[Request] = []
    tracemalloc.start()
    try:
        engine.add(engine.input_processor.check(pairs), requests)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(requests) == count
    assert size / count < 1700


def test_texts_are_tokenized_in_batches(embedded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the ids of single calls, and few calls of the tokenizer."""
    texts = [f"What is {i} + {i * 7}? \u00e9\U0001f600 <|im_end|>\n"[: 1 + i] for i in range(2500)]
    tokenizer, inputs = embedded.get_tokenizer(), embedded.engine.input_processor
    expected = [tokenizer.encode(text) for text in texts]
    params = SamplingParams()
    monkeypatch.setattr(inputs, "encode", None)
    checked = embedded.engine.input_processor.check([(text, params) for text in texts])
    assert [prompt.token_ids for prompt in checked] == expected
    assert [prompt.text for prompt in checked] == texts


def test_parameters_are_checked_once_for_each_object(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = make_engine(), []
    make_task = engine.input_processor.make_task

    def counted(params: Any) -> Any:
        calls.append(params)
        return make_task(params)

    monkeypatch.setattr(engine.input_processor, "make_task", counted)
    a, b = SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)
    checked = engine.input_processor.check([([1, 2], p) for p in (a, b, None, a, b, None, a)])
    assert calls == [a, b, None]
    lengths = [prompt.task.params.max_tokens for prompt in checked]
    assert lengths == [2, 3, 64, 2, 3, 64, 2]
    a.max_tokens = 9  # a later change is not one of a request that was checked
    assert checked[0].task.params.max_tokens == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([5, 1000], r"prompts\[1500\]: token id 1000 is outside the vocabulary"),
        ([-1], r"prompts\[1500\]: token id -1 is outside"),
        ([], r"prompts\[1500\]: the prompt is empty"),
        ([True, 1], r"prompts\[1500\]: a token id must be an int, not True"),
        ([1] * 128, r"prompts\[1500\]: the prompt has 128 tokens"),
        ("text", r"prompts\[1500\]: the engine has no tokenizer"),
    ],
)
def test_all_prompts_are_checked_before_one_is_added(bad: Any, message: str) -> None:
    engine = make_engine()
    prompts: list[Any] = [[1, 2]] * 3000
    prompts[1500] = bad
    with pytest.raises((TypeError, ValueError), match=message):
        engine.input_processor.check([(prompt, PARAMS) for prompt in prompts])
    assert engine.num_requests == 0
    assert is_idle(engine)


def test_a_text_that_cannot_be_encoded_is_named(embedded: LLM) -> None:
    texts = ["fine"] * 1200 + ["\ud800"] + ["fine"]
    with pytest.raises(ValueError, match=r"prompts\[1200\]: the text cannot be encoded"):
        embedded.generate(texts, use_tqdm=False)
    assert is_idle(embedded.engine)


def test_results_of_step_are_found_by_their_ids() -> None:
    """A caller that runs `step` rarely adds requests as fast as at first."""
    found = []
    for count in (10, 2000):
        engine = make_engine()
        for i in range(count):
            engine.add_request([i % 999, 1], PARAMS)
        while engine.output_processor.requests:
            engine.run_step()
        found.append(work_of(lambda e=engine: e.add_request([1, 2], PARAMS)))
        with pytest.raises(ValueError, match="request_id '3' is in use"):
            engine.add_request([1, 2], PARAMS, request_id="3")
        assert [out.request_id for out in engine.step()] == [str(i) for i in range(count)]
    assert found[1] <= found[0] + 50


def test_many_in_one_call_are_right(path: Path) -> None:
    """A call of several batches returns what single calls do, in the order of the prompts."""
    llm = random_llm(path, max_num_seqs=64)
    prompts = [[i % 190 + 1, i // 190 + 1] for i in range(1100)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outs = llm.generate(prompts, params)
    assert [out.prompt_token_ids for out in outs] == prompts
    streamed: dict[int, list[int]] = {}
    for new in llm.stream(prompts, params):
        streamed.setdefault(new.request_index, []).extend(new.token_ids)
    assert [streamed[i] for i in range(1100)] == [out["token_ids"] for out in outs]
    for i in (0, 999, 1000, 1099):
        assert llm.generate(prompts[i], params, use_tqdm=False)[0]["token_ids"] == streamed[i]
    assert is_idle(llm.engine)


def test_the_benchmark_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    many((20, 40))
    rows = [line.split() for line in capsys.readouterr().out.strip().split("\n")[-2:]]
    assert [row[0] for row in rows] == ["20", "40"]
    assert all(float(n.replace(",", "")) > 0 for row in rows for n in row)
