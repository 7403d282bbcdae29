"""Lesson 11a: overlap of host and device.

Kernels make steps short, and then the time of the host counts. A GPU works asynchronously: the host
only launches its work. If the host waits for the tokens of a step before it plans the next one, the
GPU is idle while the host plans. If a step takes 5 ms and a plan 3 ms, that is 3 of 8 ms. With
async scheduling, step N+1 is planned and launched before the tokens of step N are read (as in
NanoFlow, Zhu et al. 2024, arXiv:2408.12757, and in vLLM):

    without   host    plan 1 |........| commit 1, plan 2 |........| commit 2 ...
              device         | step 1 |                  | step 2 |
    with      host    plan 1 | plan 2 |..| commit 1, plan 3 |..| commit 2 ...
    overlap   device         | step 1    | step 2              | step 3
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.observer import Observer
from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import StepOutput, StepPlan
from tools.benchmarks.modes import NoModel

DEVICE_SECONDS, HOST_SECONDS = 0.005, 0.003  # of one step


class SlowDevice(NoModel):
    """A runner without a model, whose device takes DEVICE_SECONDS a step, asynchronously.

    The n-th step samples token n for each sequence.
    """

    def __init__(self) -> None:
        self.queue = ThreadPoolExecutor(1)  # one step at a time, in the order of the launches
        self.steps = 0

    def run(self, plan: StepPlan) -> Callable[[], StepOutput]:
        self.steps += 1
        tokens = [self.steps] * len(super().run(plan)().token_ids)
        done = self.queue.submit(time.sleep, DEVICE_SECONDS)
        return lambda: done.result() or StepOutput(tokens)


class Host(Observer):
    """An Observer that records the order of events. It takes HOST_SECONDS for each plan."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.plans = self.commits = self.sampled = self.dropped = 0

    def scheduled(self, step: InFlightStep | None) -> None:
        if step is not None:
            time.sleep(HOST_SECONDS)
            self.plans += 1
            self.events.append(f"plan {self.plans}")

    def committed(self, step: InFlightStep, updated: list[Sequence], output: StepOutput) -> None:
        self.commits += 1
        self.events.append(f"commit {self.commits}")
        self.sampled += len(output.token_ids)
        self.dropped += len(output.token_ids) - len(updated)


def serve(overlap: bool, params: list[SamplingParams]) -> tuple[Host, float]:
    """Run a request for each of `params` -> (host, seconds a step)."""
    config, host = EngineConfig(async_scheduling=overlap), Host()
    inputs = InputProcessor(None, 100, 100, frozenset(), SamplingParams(), 0)
    engine = LLMEngine(config, SlowDevice(), inputs)
    engine.observer = host
    for request_params in params:
        engine.add_request([0, 0, 0], request_params)
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            ids = list(output.outputs[0].token_ids)
            assert ids == list(range(1, 1 + len(ids)))  # The same with and without overlap.
    return host, (time.perf_counter() - start) / host.commits


def run() -> None:
    params = [SamplingParams(stop_token_ids=[18]), SamplingParams(max_tokens=40)]
    QUESTIONS.show(1)
    say(f"""The real LLMEngine runs two requests on a device without a model, which takes
        {DEVICE_SECONDS * 1e3:g} ms for a step, and the host takes {HOST_SECONDS * 1e3:g} ms for
        each plan. One request ends at a stop token, the other at max_tokens.""")
    rows, steps = [], []
    for overlap in (False, True):
        host, seconds = serve(overlap, params)
        print(f"async_scheduling={overlap}: {', '.join(host.events[:7])} ...")
        steps.append(seconds * 1e3)
        returned = host.sampled - host.dropped
        rows.append((overlap, f"{steps[-1]:.1f}", host.sampled, returned, host.dropped))
    print()
    head = ("async_scheduling", "ms a step", "tokens sampled", "returned", "dropped")
    show_table(head, rows)
    alone, both = DEVICE_SECONDS * 1e3, (DEVICE_SECONDS + HOST_SECONDS) * 1e3
    say(f"""A step takes {steps[0]:.1f} ms without overlap, when the device and the host work in
        turn ({both:g} ms at least), and {steps[1]:.1f} ms with it, when the slower of the two
        decides ({alone:g} ms at least). The price: step N+1 is planned when the tokens of step N
        are counted but not known. A sequence that sampled a stop token is computed once more, and
        the token is dropped.""")
    say("""A token that the host does not know yet is a placeholder of the sequence: it is counted,
        and its value is in the runner's row only. On a CPU the default is no overlap, because the
        host computes the step itself.""")
    show_source(
        link("engine.llm_engine.LLMEngine.run_step", "self.async_scheduling"),
        link("engine.scheduler.Scheduler.schedule", "num_output_placeholders += 1"),
        link("runner.rows.Rows.record", "self.last_tokens"),
        link("engine.scheduler.Scheduler.commit", "Status.FINISHED"),
    )
    say("""What to do: change HOST_SECONDS in this file to 0.005 and to 0.008, and say before each
        run what both ways take. On the ladder async scheduling has a rung, where a CPU gains
        nothing: `python -m lessons ladder 11`.""")


QUESTIONS = Questions("""
    With overlap, one token is dropped for a request that ends at a stop token, and none for a
    request that ends at max_tokens. Why? (a) The stop token is not part of the output. (b) The host
    can count tokens before it reads them, but it must read them to find a stop token, and the next
    step has been launched by then. (c) Tokens after max_tokens are not sampled, because the row is
    masked.
    Answer: b. The end at max_tokens is known when the next step is planned. A stop token is found
    one step later.
    Hint: What does the host know about a step that is in flight?
""")
