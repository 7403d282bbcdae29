"""An error or Ctrl-C at any line of a step: no request is lost, and no other one is affected."""

import contextlib
import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import pytest
from checkpoints import random_llm
from engines import is_idle

from nanovllm import (
    LLM,
    BeamSearchOutput,
    BeamSearchParams,
    LoglikelihoodOutput,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from nanovllm.engine.request import Request
from nanovllm.features.tasks.loglikelihood import tokenize_pairs

PLAIN = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPT = "What is 12 + 30?\n"
# Its answer is " gets gets gets gets gets ones is", of which three tokens are accepted drafts.
DRAFTED = SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, n=2, stop=["ones is"], logprobs=1
)

# ---- an error ----

# What runs for each request and each step.
FILES = tuple(
    f"{module}.py"
    for module in [
        "engine/block_manager",
        "engine/detokenizer",
        "engine/llm_engine",
        "engine/request",
        "engine/result_kinds",
        "engine/sampling",
        "engine/scheduler",
        "features/kv/host_cache/host_blocks",
        "engine/token_logprobs",
        "features/sampling/logit_rules/penalties",
        "features/sampling/logit_rules/row_rules",
        "features/sampling/logit_rules/rules_of_row",
        "features/sampling/ngram",
        "features/sampling/structured",
        "features/tasks/beam_search",
        "features/tasks/embeddings",
        "features/tasks/loglikelihood",
        "outputs",
    ]
)


def sampled(**fields: Any) -> Callable[[LLM], Request]:
    params = SamplingParams(temperature=0, max_tokens=6, **fields)
    return lambda llm: llm.engine.submit(PROMPT, params)


def scored(llm: LLM) -> Request:
    [(prompt, params)] = tokenize_pairs(llm.engine.input_processor, PROMPT, "12 + 30 = 42")
    return llm.engine.submit(prompt, params)


KINDS: dict[str, Callable[[LLM], Request]] = {
    "samples": sampled(n=2, seed=1),
    "text": sampled(stop=["= 4"], logprobs=2, prompt_logprobs=1, n=2),
    "stream": lambda llm: llm.engine.submit(PROMPT, PLAIN, stream=True),
    "drafts": lambda llm: llm.engine.submit("A A A A", DRAFTED),
    "embedding": lambda llm: llm.engine.submit(PROMPT, PoolingParams()),
    "score": scored,
    "beams": lambda llm: llm.engine.submit(PROMPT, BeamSearchParams(3, 5)),
    "structured": sampled(
        structured_outputs=StructuredOutputsParams(regex="[0-9]{2}"), repetition_penalty=1.1
    ),
}


def result(request: Request) -> Any:
    """What the caller of a request gets."""
    if request.stream:
        return [(sample.text, sample.seq.output_ids) for sample in request.samples]
    if isinstance(request.task.params, PoolingParams):
        return request.state
    if isinstance(request.output, LoglikelihoodOutput):
        return request.output.token_logprobs, request.output.token_ids
    if isinstance(request.output, BeamSearchOutput):
        return [(beam.tokens, beam.text) for beam in request.output.sequences]
    prompt = [list(entry or ()) for entry in request.output.prompt_logprobs or ()]
    samples = [
        (out.token_ids, out.text, out.finish_reason, [next(iter(e)) for e in out.logprobs or ()])
        for out in request.output.outputs
    ]
    return samples, [ids[:1] for ids in prompt]


def same(a: Any, b: Any) -> bool:
    """Whether results are equal. Numbers depend a little on the batch."""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return abs(a - b) < 1e-3 if isinstance(a, float) else a == b


def serve(llm: LLM, kind: str) -> tuple[list[Request], list[Exception]]:
    """Run a request of this kind between two others. Returns them, and what steps raised."""
    engine = llm.engine
    requests = [engine.submit(PROMPT, PLAIN), KINDS[kind](llm), engine.submit([5, 6], PLAIN)]
    raised = []
    for _ in range(60):
        if all(request.ended for request in requests):
            break
        try:
            engine.run_step()
        except Exception as error:
            raised.append(error)
    return requests, raised


@functools.cache
def small(asynchronous: bool, with_drafts: bool = False) -> LLM:
    """The embedded model, with so few blocks that a sequence of "text" is preempted."""
    llm = LLM(
        dtype="float32",
        device="cpu",
        async_scheduling=asynchronous,
        attention_backend="sdpa",
        num_kv_cache_blocks=11,
        block_size=4,
        max_model_len=40,
        swap_space=0.01,
        speculative_config={"prompt_lookup_min": 1} if with_drafts else None,
    )
    # Faster; its answer is "NowIn, now A". With the first layer alone all tokens would be the same.
    model = llm.engine.runner.model
    del model.layers[:-1], model.rope_of_layer[:-1]
    return llm


# A twelfth of the places, which takes a second, and the others.
ALL_BUT_FEW = [False, pytest.param(True, marks=pytest.mark.slow)]


def selected(
    lines: list[faults.Line], others: list[faults.Line], turn: int, of: int, all_but_few: bool
) -> list[int]:
    """Return the places at which faults come: one of each line. The lines that the plainest of the
    actions runs too (`others`) are divided among `of` actions; `turn` is the number of the action.

    The plainest action itself passes no `others`.
    """
    known = set(others)
    places = [
        at for at in faults.each_line(lines) if lines[at] not in known or lines[at][1] % of == turn
    ]
    return [at for number, at in enumerate(places) if (number % 12 > 0) == all_but_few]


@functools.cache
def lines_of_a_stream(asynchronous: bool) -> list[faults.Line]:
    small(asynchronous).reset_prefix_cache()
    return faults.run(lambda: serve(small(asynchronous), "stream"), FILES)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.extra) if k == "structured" else k for k in KINDS]
)
@pytest.mark.parametrize("all_but_few", ALL_BUT_FEW)
def test_an_error_at_any_line(kind: str, asynchronous: bool, all_but_few: bool) -> None:
    """It ends one request, or fails one step after which all requests go on. While results are
    committed, it ends all requests."""
    if kind == "structured":
        pytest.importorskip("llguidance")
    llm = small(asynchronous, with_drafts=kind == "drafts")
    llm.reset_prefix_cache()
    requests: list[Request] = []
    raised: list[Exception] = []

    def action() -> None:
        nonlocal requests, raised
        requests, raised = serve(llm, kind)

    before = llm.stats()
    action()
    stats = llm.stats()
    assert (stats["preemptions"] > before["preemptions"]) == (kind == "text")
    if kind == "drafts":
        assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    want = [result(request) for request in requests]
    assert raised == []
    llm.reset_prefix_cache()
    lines = faults.run(action, FILES)
    others = []
    if asynchronous or kind != "stream":
        others = lines_of_a_stream(asynchronous and kind != "stream")

    def fault() -> None:
        raise ZeroDivisionError("at a line")

    for at in selected(lines, others, list(KINDS).index(kind), len(KINDS), all_but_few):
        llm.reset_prefix_cache()
        try:
            faults.run(action, FILES, at, fault)
        except ZeroDivisionError:  # in `submit`: there is no request
            llm.engine.abort_all()
            assert is_idle(llm.engine), lines[at]
            continue
        where = f"{lines[at]}: {raised}"
        assert all(request.ended for request in requests), where
        failed = [request for request in requests if request.error is not None]
        assert len(raised) <= 1, where
        assert len(failed) <= 1 or all(request.error in raised for request in failed), where
        for request, expected in zip(requests, want, strict=True):
            if request.error is None:
                assert same(result(request), expected), where
            else:
                assert isinstance(request.error, ZeroDivisionError), where
        assert is_idle(llm.engine), where
    requests, raised = serve(llm, kind)
    assert same([result(request) for request in requests], want)


# ---- Ctrl-C ----


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def loop(llm: LLM) -> list[Any]:
    """Add requests and run steps, also if a call raises. Returns each result once, by its id."""
    outputs: list[Any] = []
    for prompt in ([1, 2, 3], [4, 5], [6, 7, 8]):
        with contextlib.suppress(KeyboardInterrupt):
            llm.engine.add_request(prompt, PLAIN)
    is_busy = True
    while is_busy:
        with contextlib.suppress(KeyboardInterrupt):
            outputs += llm.engine.step()
            is_busy = llm.engine.has_unfinished_requests()
    return [output["token_ids"] for output in outputs]


CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: [
        out["token_ids"] for out in llm.generate([[1, 2, 3], [4, 5]], PLAIN, use_tqdm=False)
    ],
    "stream": lambda llm: [
        (part.request_index, part.token_ids) for part in llm.stream([[1, 2, 3], [4, 5]], PLAIN)
    ],
    "embed": lambda llm: [
        out.outputs.embedding for out in llm.embed([[1, 2, 3], [4, 5]], use_tqdm=False)
    ],
    "beam_search": lambda llm: [
        [beam.tokens for beam in out.sequences]
        for out in llm.beam_search([[1, 2]], BeamSearchParams(2, 4), use_tqdm=False)
    ],
    "loop": loop,
}
STEP = ("engine/", "llm.py", "features/tasks/beam_search.py", "runner/")
# Without backends/cpu/thread_limit.py, whose lines depend on the time.
CPU = (
    "attention",
    "backend",
    "kernels/fused_layers",
    "kernels/parallel",
    "kernels/pointwise",
    "kernels/sampler",
)
RUNNER = ("runner/", "models/", *(f"backends/cpu/{name}.py" for name in CPU))


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("all_but_few", ALL_BUT_FEW)
def test_ctrl_c_at_any_line(path: Path, how: str, all_but_few: bool) -> None:
    """It ends a call or one step, and nothing is left behind."""
    options = dict(block_size=4, enable_prefix_caching=False, attention_backend="sdpa")
    llm = random_llm(path, num_kv_cache_blocks=6, **options)
    model = llm.engine.runner.model
    del model.layers[1:], model.rope_of_layer[1:]
    action = functools.partial(CALLS[how], llm)
    want, lines, others = action(), faults.run(action, STEP), []
    if how != "embed":
        others = faults.run(lambda: CALLS["embed"](llm), STEP)
    for at in selected(lines, others, list(CALLS).index(how), len(CALLS), all_but_few):
        got: list[Any] = []
        with contextlib.suppress(KeyboardInterrupt):
            faults.run(lambda got=got: got.append(action()), STEP, at, press)
        assert is_idle(llm.engine), lines[at]
        assert not llm.engine.lock.locked(), lines[at]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, lines[at]
        assert how != "loop" or len(got[0]) in (2, 3), lines[at]
        assert same(action(), want), lines[at]


@pytest.mark.parametrize("backend", ["sdpa", "numba"])
@pytest.mark.parametrize("all_but_few", ALL_BUT_FEW)
def test_ctrl_c_at_any_line_of_the_runner(path: Path, backend: str, all_but_few: bool) -> None:
    """It leaves a step half done. What the same engine computes next is right."""
    if backend == "numba":
        pytest.importorskip("numba")
    llm = random_llm(path, attention_backend=backend, block_size=4, num_kv_cache_blocks=20)
    fields = dict(temperature=0.8, seed=3, max_tokens=4, ignore_eos=True)
    ruled = SamplingParams(**fields, repetition_penalty=1.3, min_tokens=2)
    params = [PLAIN, ruled, SamplingParams(**fields, top_k=5, logprobs=2)]

    def action() -> list[Any]:
        prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]
        return [out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)]

    want, lines = action(), faults.run(action, RUNNER)
    for at in selected(lines, [], 0, 1, all_but_few):
        with pytest.raises(KeyboardInterrupt):
            faults.run(action, RUNNER, at, press)
        assert is_idle(llm.engine), lines[at]
        assert action() == want, lines[at]
        assert llm.generate([4, 5], ruled, use_tqdm=False)[0]["token_ids"] == want[1], lines[at]
