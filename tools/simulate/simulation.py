"""The loop of an engine whose model is a clock. It imports no torch."""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from threading import RLock
from types import SimpleNamespace
from typing import Any

from nanovllm.engine.observer import NO_OBSERVER, Observer
from nanovllm.engine.scheduler import InFlightStep, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import StepOutput
from tools.simulate.traces import UNIQUE, TraceRequest


@dataclass(slots=True)
class Wait:
    """What one request has seen so far. Times are seconds."""

    arrival: float
    first: float = -1.0  # the time of its first token
    last: float = 0.0  # the time of its last token
    computed: int = 0  # tokens that all requests had computed then


@dataclass
class Simulation:
    """A scheduler whose runner returns placeholders. A Trace can observe it like an LLMEngine.

    seconds: the time of a step.
    limits: seconds to the first token and, on average, between tokens; goodput counts the requests
        that keep both.
    concurrency: the number of requests that are unfinished at a time; 0: as many as have arrived.
    """

    scheduler: Scheduler
    seconds: Callable[[InFlightStep], float]
    limits: tuple[float, float] = (1.0, 0.1)
    concurrency: int = 0
    async_scheduling: bool = False
    input_processor: Any = field(default_factory=lambda: SimpleNamespace(tokenizer=None))
    lock: Any = field(default_factory=RLock)
    observer: Observer = NO_OBSERVER

    def __post_init__(self) -> None:
        self.now = 0.0
        self.steps = self.computed = self.ended = self.good = self.stall = self.outputs = 0
        self.first, self.between = array("d"), array("d")
        self.waits: dict[Sequence, Wait] = {}
        self.in_flight: deque[InFlightStep] = deque()

    def run(self, requests: list[TraceRequest]) -> Iterator[int]:
        """Run all requests, sorted by time. Yields how many have ended, after each step."""
        coming = deque(enumerate(requests))
        while coming or self.scheduler.has_work():
            if not self.scheduler.has_work() and not self.concurrency:
                self.now = max(self.now, coming[0][1].time)
            while coming and self.is_here(coming[0][1]):
                self.add(*coming.popleft())
            self.step()
            yield self.ended

    def is_here(self, request: TraceRequest) -> bool:
        if self.concurrency:
            return len(self.waits) < self.concurrency
        return request.time <= self.now

    def add(self, number: int, request: TraceRequest) -> None:
        lengths = request.num_prompt, request.num_prompt + request.num_output
        seq = Sequence(str(number), number, request.token_ids(), *lengths)
        self.waits[seq] = Wait(self.now if self.concurrency else request.time)
        self.scheduler.add(seq)

    def step(self) -> None:
        """Plan a step, let its time pass, and commit the steps whose tokens are due."""
        self.observer.begin()
        step = self.scheduler.schedule()
        self.observer.scheduled(step)
        if step is None and not self.in_flight:
            raise ValueError(f"no request can be admitted: {self.scheduler.why_waiting}")
        if step is not None:
            self.steps += 1
            self.computed += step.plan.num_tokens
            self.now += self.seconds(step)
            self.in_flight.append(step)
        num_left = 1 if step is not None and self.async_scheduling else 0
        while len(self.in_flight) > num_left:
            self.commit(self.in_flight.popleft())

    def commit(self, step: InFlightStep) -> None:
        # A placeholder is a token of its request alone, so outputs match no prompt.
        token_ids = [UNIQUE + seq.arrival for seq in step.sampling_seqs]
        self.observer.begin()
        updated = self.scheduler.commit(step, token_ids)
        self.observer.committed(step, updated, StepOutput(token_ids))
        for seq in updated:
            wait = self.waits[seq]
            if wait.first < 0:
                wait.first = self.now
                self.first.append(self.now - wait.arrival)
            else:
                self.between.append(self.now - wait.last)
                self.stall = max(self.stall, self.computed - wait.computed)
            wait.last = self.now
            wait.computed = self.computed
            self.outputs += 1
            if seq.finish_reason is not None:
                self.end(self.waits.pop(seq), seq.num_output)

    def end(self, wait: Wait, num_output: int) -> None:
        self.ended += 1
        mean = (wait.last - wait.first) / max(1, num_output - 1)
        self.good += wait.first - wait.arrival <= self.limits[0] and mean <= self.limits[1]

    def results(self) -> dict[str, float]:
        """Return the figures of the requests so far. Times are seconds, rates are per second."""
        scheduler = self.scheduler
        seconds = max(self.now, 1e-9)
        return {
            "requests": self.ended,
            "steps": self.steps,
            "seconds": self.now,
            "requests_per_second": self.ended / seconds,
            "output_tokens_per_second": self.outputs / seconds,
            "hit_share": scheduler.cached_tokens / max(1, scheduler.prompt_tokens),
            "first_token_p50": percentile(self.first, 50),
            "first_token_p99": percentile(self.first, 99),
            "between_tokens_mean": fmean(self.between) if self.between else 0.0,
            "between_tokens_p50": percentile(self.between, 50),
            "between_tokens_p99": percentile(self.between, 99),
            "longest_stall_tokens": self.stall,
            "preemptions": scheduler.preemptions,
            "recomputed_tokens": scheduler.recomputed_tokens,
            "goodput": self.good / seconds,
        }


def percentile(values: "array[float]", percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return quantiles(values, n=100, method="inclusive")[percent - 1]
