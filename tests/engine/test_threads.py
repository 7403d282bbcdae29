"""Several callers of one engine: threads, logits processors, forked processes."""

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import fresh
import pytest
from checkpoints import random_llm
from engines import is_idle, run_in_threads

from nanovllm import LLM, SamplingParams
from nanovllm.engine import llm_engine
from nanovllm.plan import StepPlan

GREEDY = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


def call(llm: LLM, how: str, prompt: list[int], params: SamplingParams) -> tuple[list[int], str]:
    """(tokens, finish_reason) of a request by one of the calls that run the engine."""
    if how == "generate":
        sample = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        return sample.token_ids, sample.finish_reason
    parts = list(llm.stream(prompt, params))
    return [token for part in parts for token in part.token_ids], parts[-1].finish_reason


def test_requests_of_threads_share_steps(path: Path) -> None:
    """A request that is added during a step of another thread runs in the next step."""
    llm = random_llm(path)
    run, sizes, added = llm.engine.runner.run, [], threading.Event()

    def watched(plan):
        sizes.append(len(plan.decode_rows) + len(plan.chunks))
        if len(sizes) == 3:
            added.set()
            while len(llm.engine.requests) < 2:
                time.sleep(0.001)
        return run(plan)

    def second() -> None:
        assert added.wait(60)
        call(llm, "generate", [3, 4], GREEDY)

    llm.engine.runner.run = watched
    run_in_threads([lambda: call(llm, "generate", [1, 2], GREEDY), second])
    assert sizes == [1] * 3 + [2] * 5 + [1] * 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_calls_of_all_kinds_in_threads(path: Path, asynchronous: bool) -> None:
    """generate, stream and a manual loop at once: each gets its own requests, and all of them."""
    llm = random_llm(path, async_scheduling=asynchronous, max_num_seqs=3)
    prompts = [[i, i + 1, i + 2] for i in range(1, 13)]
    want = [o["token_ids"] for o in llm.generate(prompts, GREEDY, use_tqdm=False)]

    def calls(how: str, first: int) -> None:
        for _ in range(4):
            for i in range(first, first + 3):
                assert call(llm, how, prompts[i], GREEDY)[0] == want[i]
            llm.stats()

    def manual_loop() -> None:
        for _ in range(4):
            ids = [llm.engine.add_request(prompts[i], GREEDY) for i in (9, 10, 11)]
            llm.engine.abort_request(llm.engine.add_request(prompts[0], LONG))
            outs = {}
            while len(outs) < len(ids):
                outs |= {o.request_id: o["token_ids"] for o in llm.engine.step()}
            assert [outs[i] for i in ids] == want[9:]

    run_in_threads(
        [
            lambda: calls("generate", 0),
            lambda: calls("generate", 3),
            lambda: calls("stream", 6),
            manual_loop,
        ]
    )
    assert is_idle(llm.engine)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ctrl_c_ends_the_call_of_the_main_thread_only(path: Path, asynchronous: bool) -> None:
    """Whichever thread runs the step."""
    llm = random_llm(path, async_scheduling=asynchronous)
    want = llm.generate([1, 2], LONG, use_tqdm=False)[0]["token_ids"]
    run, got, steps = llm.engine.runner.run, [], itertools.count()

    def pressed(plan):
        if len(llm.engine.requests) == 3 and next(steps) == 50:
            os.kill(os.getpid(), signal.SIGINT)
        return run(plan)

    llm.engine.runner.run = pressed
    worker = threading.Thread(target=lambda: got.append(call(llm, "generate", [1, 2], LONG)[0]))
    worker.start()
    with pytest.raises(KeyboardInterrupt) as interrupted:
        llm.generate([[3], [4]], LONG, use_tqdm=False)
    worker.join(60)
    assert got == [want]
    assert [out.outputs[0].finish_reason for out in interrupted.value.outputs] == ["abort"] * 2
    assert is_idle(llm.engine)


# ---- requests that end from elsewhere ----


@pytest.mark.parametrize("how", ["generate", "stream"])
@pytest.mark.parametrize("end", ["shutdown", "abort_request"])
def test_abort_in_another_thread(path: Path, how: str, end: str) -> None:
    llm = random_llm(path)

    def abort() -> None:
        while llm.stats()["output_tokens"] < 3:
            time.sleep(0.001)
        if end == "shutdown":
            llm.shutdown()
        else:
            llm.engine.abort_request(next(iter(llm.engine.requests)))

    def check() -> None:
        tokens, reason = call(llm, how, [1, 2], LONG)
        assert reason == "abort"
        assert 3 <= len(tokens) < 400

    run_in_threads([check, abort])
    assert is_idle(llm.engine)
    assert call(llm, how, [1, 2], GREEDY)[1] != "abort"


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_processor_that_calls_its_engine(path: Path, how: str) -> None:
    llm = random_llm(path)

    def reenter(token_ids, logits):
        call(llm, how, [1], GREEDY)
        return logits

    params = SamplingParams(max_tokens=4, logits_processors=[reenter])
    with pytest.raises(RuntimeError, match="a logits processor cannot run the engine"):
        llm.generate([1, 2], params, use_tqdm=False)
    assert is_idle(llm.engine)
    assert len(llm.generate([1, 2], GREEDY, use_tqdm=False)) == 1


# ---- engines that start at the same time ----


FIRST_START = """
import threading
from nanovllm import LLM, SamplingParams, StructuredOutputsParams

barrier, texts = threading.Barrier(4, timeout=60), []

def start(dtype: str) -> None:
    barrier.wait()
    llm = LLM(dtype=dtype, device="cpu", attention_backend="{backend}", num_kv_cache_blocks=64)
    for _ in range(5):
        barrier.wait()
        texts.append(llm.generate("What is 12 + 30?\\n", use_tqdm=False)[0]["text"])

threads = [threading.Thread(target=start, args=[d]) for d in ("float32", "bfloat16") * 2]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert texts == ["12 + 30 = 42"] * 20, texts
"""


@pytest.mark.parametrize("case", ["sdpa", "numba"])
def test_the_first_engines_start_at_once(case: str) -> None:
    """In a process that has imported neither transformers nor Numba, and with each kind of threads.

    Numba has the threads of "workqueue" where it finds no OpenMP. Two calls at once end the
    process.
    """
    if case == "numba":
        pytest.importorskip("numba")
    done = fresh.run(
        FIRST_START.format(backend=case),
        threads=2,
        NUMBA_THREADING_LAYER="workqueue",
        OMP_NUM_THREADS="2",
    )
    assert done.returncode == 0, done.stderr


# ---- processes ----


FORK = """
import os, signal, sys, torch
from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.utils import host

def make(backend: str) -> LLM:
    options = dict(dtype="float32", device="cpu", skip_tokenizer_init=True)
    return LLM(attention_backend=backend, **options)

def use(llm: LLM) -> int:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    return len(llm.generate([5] * 500, params, use_tqdm=False)[0]["token_ids"])

def fork(before: str, backend: str, llm: LLM | None = None) -> None:
    if os.fork() == 0:
        signal.alarm(100)  # ends the process if it hangs
        for attempt in (lambda: use(llm or make(backend)), lambda: use(make(backend))):
            try:
                print(before, backend, attempt(), sep=": ")
            except RuntimeError as error:
                print(before, backend, error, sep=": ")
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0

backends = ("auto", "sdpa")
for backend in backends:
    fork("nothing", backend)
torch.ones(1 << 20).exp()
host.TRIAL = 1  # second, for which each of the following waits once or twice
for backend in backends:
    fork("torch", backend)
for backend in backends:
    fork("llm", backend, make(backend))
"""


@pytest.mark.slow
def test_forked_processes() -> None:
    """OpenMP's threads are not in the child, which works only if they start after the fork."""
    done = fresh.run(FORK, threads=2, OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    said: dict[tuple[str, str], list[str]] = {}
    for line in done.stdout.splitlines():
        before, backend, answer = line.split(": ", 2)
        said.setdefault((before, backend), []).append(answer)
    assert len(said) == 6
    for (before, _), (first, second) in said.items():
        if before == "nothing":
            assert (first, second) == ("3", "3")
        else:
            assert ("made in another process" if before == "llm" else "used OpenMP") in first
            assert "used OpenMP" in second
            assert "get_context('spawn')" in first
            assert "get_context('spawn')" in second


def test_ctrl_c_twice(path: Path, monkeypatch) -> None:
    """The second comes before the step that the first has ended is reverted."""
    llm = random_llm(path)
    engine, run, hold = llm.engine, llm.engine.runner.run, llm_engine.hold_interrupt
    want = call(llm, "generate", [1, 2], GREEDY)[0]

    def press_again() -> None:
        monkeypatch.setattr(llm_engine, "hold_interrupt", hold)
        raise KeyboardInterrupt

    def press(plan: StepPlan) -> None:
        monkeypatch.setattr(llm_engine, "hold_interrupt", press_again)
        raise KeyboardInterrupt

    engine.add_request([1, 2], GREEDY, "a")
    engine.runner.run = press
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.runner.run = run
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output["token_ids"] for output in outputs] == [want]
    assert is_idle(engine)


def test_an_abort_of_a_request_that_another_thread_ends(path: Path) -> None:
    class Ending(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            return super().__contains__(key) and self.pop(key) is not None

    llm = random_llm(path)
    llm.engine.requests = Ending()
    llm.engine.add_request([1, 2], GREEDY, "a")
    llm.engine.abort_request(["a", "b"])
    assert is_idle(llm.engine)
