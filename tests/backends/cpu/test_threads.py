"""The threads of a step on a CPU: as many as other processes leave, unless the user chose."""

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, random_llm

from nanovllm import SamplingParams
from nanovllm.backends.cpu import threads
from nanovllm.backends.cpu.threads import ThreadLimit, busy_ticks, quota

STAT = """cpu  300 0 60 900 40 0 0 0 0 0
cpu0 100 2 30 400 20 1 2 3 0 0
cpu1 200 0 30 500 20 0 0 0 0 0
cpu10 7 0 0 0 0 0 0 0 0 0
intr 12345
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_busy_ticks_of_the_cores_of_this_process() -> None:
    assert busy_ticks(STAT, [0, 1]) == 138 + 230
    assert busy_ticks(STAT, [1]) == 230


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 8), ("150000 100000", 2), ("1000 100000", 1), ("?", 8)]
)
def test_quota_of_a_container(text: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert quota(8) == cores


def limit(monkeypatch: pytest.MonkeyPatch, cores: int, *looks: tuple[float, float, float]):
    """A ThreadLimit on so many cores, which looks once a call and finds these."""
    torch.set_num_threads(cores)
    monkeypatch.setattr(threads, "INTERVAL", 0.0)
    monkeypatch.setattr(threads, "quota", lambda _: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    found = iter(looks)
    monkeypatch.setattr(ThreadLimit, "look", lambda self: next(found))
    return ThreadLimit()


def used(limited: ThreadLimit) -> int:
    with limited():
        return torch.get_num_threads()


def test_threads_follow_the_load_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # (time, busy seconds of 4 cores, seconds of this process)
    looks = [(0, 0, 0), (1, 4, 4), (2, 8, 7), (3, 12, 7.5), (4, 16, 7.5), (5, 17.3, 8.5)]
    limited = limit(monkeypatch, 4, *looks)
    assert [used(limited) for _ in looks[1:]] == [4, 3, 1, 1, 4]
    assert torch.get_num_threads() == 4


def test_a_number_that_the_user_chose_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(i, 4 * i, 0) for i in range(9)]  # all cores belong to others
    limited = limit(monkeypatch, 4, *looks)
    assert used(limited) == 1
    torch.set_num_threads(3)
    assert used(limited) == 3
    torch.set_num_threads(4)
    assert used(limited) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert used(limit(monkeypatch, 4, *looks)) == 4


def test_the_setting_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = limit(monkeypatch, 2, *[(i, 2 * i, 0) for i in range(5)])
    with pytest.raises(RuntimeError, match="lost"), limited():
        assert torch.get_num_threads() == 1
        raise RuntimeError("lost")
    assert torch.get_num_threads() == 2


def test_other_threads_keep_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that uses torch for the first time during a step, and after it."""
    limited = limit(monkeypatch, 2, *[(i, 2 * i, 0) for i in range(5)])
    seen: list[int] = []

    def look() -> None:
        seen.append(torch.get_num_threads())
        during.set()
        assert after.wait(60)
        seen.append(torch.get_num_threads())

    during, after = threading.Event(), threading.Event()
    other = threading.Thread(target=look)
    with limited():
        assert torch.get_num_threads() == 1
        other.start()
        assert during.wait(60)
    after.set()
    other.join(60)
    assert seen == [2, 2]


def test_steps_of_an_engine_follow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path)
    torch.set_num_threads(2)
    llm = random_llm(tmp_path)
    seen: list[int] = []
    runner = llm.engine.runner
    looks = itertools.count()
    runner.thread_limit = limit(monkeypatch, 2, *[(i, 2 * next(looks), 0) for i in range(99)])
    forward = runner.model.forward

    def watched(*args: object) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return forward(*args)

    runner.model.forward = watched
    llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert seen == [1] * 4
    assert torch.get_num_threads() == 2
