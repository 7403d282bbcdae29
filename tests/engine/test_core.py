"""Overlap: with async_scheduling, step N+1 is planned and launched before step N's tokens are read.

On a fake runner: no model, but the oracle's memory, so that the answers must be right too.
"""

import itertools

import pytest
from fake_runner import FakeRunner, greedy

from lessons.oracle.oracle import answer


def launched(step: int) -> list[tuple[str, int]]:
    return [("schedule", step), ("run", step)]


def test_the_next_step_is_launched_before_tokens_are_read(make) -> None:
    llm = make(True)
    llm.generate([[1, 2], [0]], greedy(max_tokens=4), use_tqdm=False)
    wanted = launched(0)
    for step in range(1, 4):
        wanted += [*launched(step), ("wait", step - 1)]
    assert llm.engine.runner.events == [*wanted, ("wait", 3)]


def test_without_overlap_tokens_are_read_first(make) -> None:
    llm = make(False)
    llm.generate([[1, 2], [0]], greedy(max_tokens=4), use_tqdm=False)
    wanted = [event for step in range(4) for event in (*launched(step), ("wait", step))]
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
            known = engine.output_processor.requests[gone].samples[0].seq.num_output
            engine.abort_request(gone)
        if not engine.has_unfinished_requests():
            break
        outs += engine.step()
    assert [out.request_id for out in outs] == [kept]
    assert outs[0]["token_ids"] == answer([2, 0], 11, frozenset(), 3)
    assert sum(engine.runner.drawn) - 9 - known == (1 if asynchronous else 0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preemption_changes_no_output(make, asynchronous: bool, monkeypatch) -> None:
    monkeypatch.setattr(FakeRunner, "num_blocks", 12)
    llm = make(asynchronous)
    prompts = [[i % 3] * 5 for i in range(4)]
    outs = llm.generate(prompts, greedy(max_tokens=20), use_tqdm=False)
    for prompt, out in zip(prompts, outs, strict=True):
        assert out["token_ids"] == answer(prompt, 25, frozenset(), 3)
    assert llm.stats()["preemptions"] > 0
    # Every token is drawn once: a preempted sequence keeps what is in flight.
    assert sum(llm.engine.runner.drawn) == 80
