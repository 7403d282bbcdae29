"""Whatever fails or is interrupted: the engine stays usable, and no other request is affected."""

import gc
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_llm
from engines import is_idle

from lessons.oracle.oracle import OracleRunner, make_samples
from nanovllm import SamplingParams
from nanovllm.engine import results, sampling
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.recovery import revert_in_flight
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize(
    ("part", "function"), [("scheduler", "commit"), ("scheduler", "add"), ("results", "end")]
)
def test_an_abandoned_stream_is_collected_while_the_engine_changes(
    path: Path, part: str, function: str, monkeypatch
) -> None:
    """Its finalizer aborts requests in the middle of any code of the same thread."""
    llm = random_llm(path)
    want = [o["token_ids"] for o in llm.generate([[1, 2], [3]], GREEDY, use_tqdm=False)]

    class Client:
        def __init__(self) -> None:
            self.me = self
            self.stream = llm.stream([[5, 6], [7, 8]], GREEDY)
            next(self.stream)

    changed: Any = results if part == "results" else llm.engine.scheduler
    inner = getattr(changed, function)

    def collected(*args):
        gc.collect()
        return inner(*args)

    gc.disable()
    try:
        Client()
        monkeypatch.setattr(changed, function, collected)
        got = [o["token_ids"] for o in llm.generate([[1, 2], [3]], GREEDY, use_tqdm=False)]
    finally:
        gc.enable()
    assert got == want
    assert is_idle(llm.engine)


# ---- what a request's own data raise ends that request ----


def test_a_failing_logits_processor_ends_its_own_request_only(path: Path, caplog) -> None:
    """The thread that runs the step, which may be another's, goes on."""
    llm = random_llm(path)

    def fails(output_ids, logits):
        if len(output_ids) == 2:
            raise KeyError("not yours")

    params = SamplingParams(temperature=0, max_tokens=8, logits_processors=[fails])
    want = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0]["token_ids"]
    with pytest.raises(KeyError, match="not yours"):
        llm.generate([1, 2], params, use_tqdm=False)
    with pytest.raises(KeyError, match="not yours"):
        list(llm.stream([1, 2], params))
    other = llm.engine.submit([1, 2], params)  # as if by another thread
    llm.engine.add_request([1, 2], params, request_id="by step")
    assert llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0]["token_ids"] == want
    assert isinstance(other.error, KeyError)
    assert other.output is not None
    assert other.output.outputs[0].finish_reason == "error"
    assert len(other.output["token_ids"]) == 2
    assert [(o.request_id, o.outputs[0].finish_reason) for o in llm.engine.step()] == [
        ("by step", "error")
    ]
    assert "request by step failed" in caplog.text
    assert "not yours" in caplog.text


def test_min_tokens_beyond_any_length(path: Path) -> None:
    llm = random_llm(path, max_model_len=12)
    params = SamplingParams(temperature=0, min_tokens=2**63, max_tokens=None, stop_token_ids=[3])
    out = llm.generate([1, 2], params, use_tqdm=False)[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (10, "length")


# ---- a failure between two changes ----


def test_a_commit_that_fails_revives_no_finished_sequence() -> None:
    """The runner returns too few tokens, after the first of them has ended its sequence."""
    blocks = BlockManager(20, 4)
    scheduler, runner = Scheduler(blocks, 4, 100), OracleRunner(20, 4, 4)
    first, second = (make_samples([i, 1, 2], 3 + i, arrival=i)[0] for i in (1, 2))
    scheduler.add(first)
    scheduler.add(second)
    step = scheduler.schedule()
    with pytest.raises(ValueError, match="shorter"):
        scheduler.commit(step, runner.run(step.plan)[:1])
    revert_in_flight(scheduler, [*scheduler.running, *scheduler.waiting])
    while scheduler.has_work():
        step = scheduler.schedule()
        scheduler.commit(step, runner.run(step.plan))
    assert (len(first.output_ids), len(second.output_ids)) == (1, 2)
    assert blocks.num_available == 20


def test_results_of_an_aborted_request_are_not_those_of_its_successor(path: Path) -> None:
    """A new request has its id, while the step of the old one is in flight."""
    llm = random_llm(path, async_scheduling=True)
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
    want = llm.generate([7, 8], params, use_tqdm=False)[0].prompt_logprobs
    engine = llm.engine
    engine.add_request([1, 2, 3, 4, 5, 6], params, request_id="a")
    engine.step()
    engine.abort_request("a")
    engine.add_request([7, 8], params, request_id="a")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [len(o.prompt_logprobs) for o in outputs] == [2]
    assert list(outputs[0].prompt_logprobs[1]) == list(want[1])


def test_a_policy_that_raises_queues_nothing(path: Path) -> None:
    llm = random_llm(path)

    def fails(seq: Sequence, blocks: BlockManager) -> int:
        raise ZeroDivisionError

    key, llm.engine.scheduler.policy_key = llm.engine.scheduler.policy_key, fails
    with pytest.raises(ZeroDivisionError):
        llm.engine.add_request([1, 2], GREEDY)
    llm.engine.scheduler.policy_key = key
    assert is_idle(llm.engine)


def test_a_request_that_failed_ends_although_its_step_fails_too(path: Path, monkeypatch) -> None:
    """Its other samples wait for the prompt, and are counted once."""
    llm = random_llm(path, max_num_batched_tokens=4)
    end, calls = results.end, 0

    def fails_once(*args):
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("the step fails")
        return end(*args)

    def fails(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(sampling, "decode_logprobs", fails)
    monkeypatch.setattr(results, "end", fails_once)
    params = SamplingParams(n=3, prompt_logprobs=1)
    request = llm.engine.submit([1, 2, 3, 4, 5, 6, 7, 8], params)
    with pytest.raises(RuntimeError, match="the step fails"):
        llm.engine.run_step()
    assert isinstance(request.error, ZeroDivisionError)
    assert request.ended
    assert is_idle(llm.engine)
    stats = llm.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
