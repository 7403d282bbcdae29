"""The threads of a step on a CPU: as many as other processes leave, and at most the user's."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_llm

from nanovllm import SamplingParams
from nanovllm.backends.cpu import thread_limit
from nanovllm.backends.cpu.kernels import fused_layers
from nanovllm.backends.cpu.thread_limit import Clocks, ThreadLimit
from nanovllm.models.weights import CheckpointTensor

# What two cores do in a second, recorded on an AMD EPYC beside so many processes in an endless
# loop: (threads, neighbours) -> (idle time of the cores, time used by this process, its threads'
# waiting)
RECORDED = {
    (2, "none"): (0.00, 1.99, 0.01),
    (1, "none"): (0.98, 1.00, 0.00),
    (2, "one"): (0.00, 1.21, 0.78),
    (1, "one"): (0.00, 0.91, 0.09),
    (2, "two"): (0.00, 0.95, 1.04),
    (1, "two"): (0.00, 0.63, 0.37),
    (2, "one of another session"): (0.00, 0.97, 1.03),
    (1, "one of another session"): (0.00, 0.95, 0.04),
    (2, "one, nice 10"): (0.00, 1.80, 0.18),
    (1, "one, nice 10"): (0.00, 0.99, 0.01),
    (2, "two, nice 10"): (0.00, 1.73, 0.27),
    (1, "two, nice 10"): (0.00, 0.98, 0.01),
    (2, "one, nice 19"): (0.00, 1.91, 0.09),
    (1, "one, nice 19"): (0.00, 1.00, 0.00),
    (2, "two, nice 19"): (0.00, 1.88, 0.11),
    (1, "two, nice 19"): (0.00, 0.99, 0.01),
}
NEIGHBOURS = sorted({who for _, who in RECORDED} - {"none"})


def best(who: str) -> int:
    """The number of threads with which the recorded call was faster."""
    return 2 if who == "none" or "nice" in who else 1


@pytest.fixture(autouse=True)
def restored(monkeypatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_clocks_of_the_kernel() -> None:
    limited = ThreadLimit()
    if limited.set_num_threads is None:
        pytest.skip("nothing is limited on this system")
    last = limited.read_clocks()
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        pass
    past = limited.read_clocks().since(last)
    assert past.used > 0
    assert past.waited >= 0
    assert 0 <= past.idle <= 1.1 * past.time * len(limited.cores)


class Cores:
    """Two cores, and neighbours that come and go. Clocks advance as they did when recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.who, self.clocks = "none", Clocks(100, 0, 0, 0)
        torch.set_num_threads(2)
        monkeypatch.setattr(thread_limit, "available_cores", lambda: [0, 1])
        monkeypatch.setattr(thread_limit, "quota", lambda cores: cores)
        monkeypatch.setattr(thread_limit.time, "monotonic", self.monotonic)
        monkeypatch.setattr(ThreadLimit, "read_clocks", lambda limited: self.clocks)

    def limit(self) -> ThreadLimit:
        """A limit that is old enough for a measurement."""
        limited = ThreadLimit()
        self.pause(0.2)
        return limited

    def monotonic(self) -> float:
        self.spend(0.001)
        return self.clocks.time

    def spend(self, seconds: float) -> None:
        rates = (1.0, *RECORDED[torch.get_num_threads(), self.who])
        self.clocks = Clocks(
            *(clock + seconds * rate for clock, rate in zip(self.clocks, rates, strict=True))
        )

    def pause(self, seconds: float) -> None:
        busy = sum(self.who.startswith(word) for word in ("one", "two", "two"))
        idle = seconds * (2 - busy)
        self.clocks = Clocks(self.clocks[0] + seconds, self.clocks[1] + idle, *self.clocks[2:])

    def steps(self, limited: ThreadLimit, seconds: float) -> list[int]:
        """Run steps of 60 ms for so long. Returns the threads of each."""
        end, used = self.clocks.time + seconds, []
        while self.clocks.time < end:
            with limited():
                used.append(torch.get_num_threads())
                self.spend(0.06)
        return used


@pytest.mark.parametrize("who", NEIGHBOURS)
def test_neighbours_before_a_call(who: str, monkeypatch) -> None:
    """The pause between two calls is measured too."""
    cores = Cores(monkeypatch)
    limited = cores.limit()
    cores.who = who
    assert cores.steps(limited, 5)[-1] == best(who)
    cores.pause(10)
    cores.who = "none"
    cores.pause(30)
    assert set(cores.steps(limited, 5)) == {2}


@pytest.mark.parametrize("who", NEIGHBOURS)
def test_neighbours_during_a_call(who: str, monkeypatch) -> None:
    cores = Cores(monkeypatch)
    limited = cores.limit()
    assert set(cores.steps(limited, 1)) == {2}
    cores.who = who
    used = cores.steps(limited, 60)[3:]
    # A trial of one more thread takes few steps, and there are few trials.
    assert used[:80].count(best(who)) >= 0.9 * 80
    assert used.count(best(who)) > 0.95 * len(used)
    cores.who = "none"
    assert set(cores.steps(limited, 5)[5:]) == {2}, "from 0.3 s on"


def test_a_limit_is_tried_again(monkeypatch) -> None:
    """Also if the cores are never idle, so that only a trial shows that a thread gets a core."""
    cores = Cores(monkeypatch)
    limited = cores.limit()
    cores.who = "one"
    assert cores.steps(limited, 5)[-1] == 1
    cores.who = "one, nice 19"
    used = cores.steps(limited, 10)
    assert used[0] == 1
    assert set(used[-50:]) == {2}


def test_a_long_step_changes_between_its_layers(monkeypatch) -> None:
    cores = Cores(monkeypatch)
    limited = cores.limit()
    limited.adjust()  # no step runs
    used = []
    with limited():
        for cores.who in ["none"] * 20 + ["one"] * 20 + ["none"] * 20:
            limited.adjust()
            used.append(torch.get_num_threads())
            cores.spend(0.06)
    assert (set(used[:20]), set(used[23:40]), set(used[43:])) == ({2}, {1}, {2})
    assert torch.get_num_threads() == 2


def test_many_cores(monkeypatch) -> None:
    """Numbers of threads from 16 on, by what was waited and what is free."""
    monkeypatch.setattr(thread_limit, "available_cores", lambda: list(range(16)))
    monkeypatch.setattr(thread_limit, "quota", lambda cores: cores)
    torch.set_num_threads(16)
    limited = ThreadLimit()
    for past, number in (
        (Clocks(1, 0, 15.9, 0.05), 16),  # the sixteenth thread still gains
        (Clocks(1, 0, 15.4, 0.5), 15),
        (Clocks(1, 0, 13, 2.1), 13),
        (Clocks(1, 0.4, 12.6, 0), 13),
        (Clocks(1, 8, 7, 0), 15),  # only a part of the work is parallel
        (Clocks(2, 6, 26, 0), 16),
    ):
        limited.set_limit(past)
        assert limited.limit == number


def test_a_number_that_the_user_chose_is_the_most(monkeypatch) -> None:
    cores = Cores(monkeypatch)
    limited = cores.limit()
    cores.who = "one"
    assert cores.steps(limited, 1)[-1] == 1
    cores.who = "none"
    torch.set_num_threads(1)
    assert set(cores.steps(limited, 1)) == {1}
    torch.set_num_threads(2)
    assert cores.steps(limited, 5)[-1] == 2


@pytest.mark.parametrize("value", ["2", "all of them", ""])
def test_the_environment_does_not_make_threads_wait(value: str, monkeypatch) -> None:
    """OMP_NUM_THREADS, which torch has read, is no reason to spin next to a busy process."""
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    cores = Cores(monkeypatch)
    limited = cores.limit()
    cores.who = "one"
    assert cores.steps(limited, 5)[-1] == 1


def test_steps_of_an_engine_follow_it(path: Path, monkeypatch) -> None:
    """Layer by layer, in torch and in Numba, whose teams are as before after the steps."""
    numba = pytest.importorskip("numba")
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("Numba has one core")
    torch.set_num_threads(2)
    numba.set_num_threads(2)

    def adjust(self: ThreadLimit) -> None:
        self.limit = 3 - self.limit
        self.set_num_threads(self.limit)

    monkeypatch.setattr(ThreadLimit, "adjust", adjust)
    options: dict[str, Any] = dict(max_num_batched_tokens=70)  # too many for one call of all layers
    llm = random_llm(path, attention_backend="numba", **options)
    seen, compute = [], fused_layers.compute_layers

    def watched(code: Any, step: Any, *args: object) -> None:
        if step.rows > 64:
            seen.append((torch.get_num_threads(), step.parts))
        compute(code, step, *args)

    monkeypatch.setattr(fused_layers, "compute_layers", watched)
    llm.generate([[1, 2] * 70], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert set(seen) == {(1, 1), (2, 2)}
    assert torch.get_num_threads() == numba.get_num_threads() == 2


def test_loading_is_limited(path: Path, monkeypatch) -> None:
    """A weight in int4 has many small operations, and each would wait for a busy core."""
    torch.set_num_threads(2)
    running, used = [], []
    load = CheckpointTensor.load

    def adjust(self: ThreadLimit) -> None:
        running.append(self.running)
        self.set_num_threads(1)

    def watched(tensor: CheckpointTensor, file: Any) -> None:
        used.append(torch.get_num_threads())
        load(tensor, file)

    monkeypatch.setattr(ThreadLimit, "adjust", adjust)
    monkeypatch.setattr(CheckpointTensor, "load", watched)
    random_llm(path, quantization="int4")
    assert set(used) == {1}
    assert running.count(True) > len(used)
    assert torch.get_num_threads() == 2
