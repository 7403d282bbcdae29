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

from lessons.pictures import show_lanes
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.observer import Observer
from nanovllm.engine.scheduler import InFlightStep, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import StepOutput, StepPlan
from nanovllm.runner.rows import Rows

DEVICE_SECONDS, HOST_SECONDS = 0.005, 0.003  # of one step


def take(seconds: float) -> tuple[float, float]:
    """Wait -> when the wait began and ended."""
    start = time.perf_counter()
    time.sleep(seconds)
    return start, time.perf_counter()


class Device:
    """A Runner without a model. Its device takes DEVICE_SECONDS a step, asynchronously.

    The token that is sampled after n tokens of a sequence is n.
    """

    num_blocks, async_scheduling = 64, True

    def __init__(self) -> None:
        self.queue = ThreadPoolExecutor(1)  # one step at a time, in the order of the launches
        self.lengths: dict[int, int] = {}  # row -> computed tokens
        self.sampled = 0
        self.spans = list[tuple[float, float]]()  # when each step began and ended

    def run(self, plan: StepPlan) -> Callable[[], StepOutput]:
        for chunk in plan.chunks:
            self.lengths[chunk.row] = chunk.start + len(chunk.token_ids)
        for row in plan.decode_rows:
            self.lengths[row] += 1
        rows = [chunk.row for chunk in plan.chunks if chunk.result_kind] + plan.decode_rows
        tokens = [self.lengths[row] for row in rows]
        self.sampled += len(tokens)
        done = self.queue.submit(lambda: self.spans.append(take(DEVICE_SECONDS)))

        def wait() -> StepOutput:
            done.result()
            return StepOutput(tokens)

        return wait


class Host(Observer):
    """An Observer that records the order of events. It takes HOST_SECONDS for each plan."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.spans = list[tuple[float, float]]()  # when each plan began and ended
        self.dropped = self.returned = 0

    def scheduled(self, step: InFlightStep | None) -> None:
        if step is not None:
            self.record("plan")
            self.spans.append(take(HOST_SECONDS))

    def committed(self, step: InFlightStep, updated: list[Sequence], output: StepOutput) -> None:
        self.record("commit")
        self.dropped += len(step.sampling_seqs) - len(updated)

    def record(self, what: str) -> None:
        self.events.append(f"{what} {1 + sum(event.startswith(what) for event in self.events)}")


def serve(overlap: bool, params: list[SamplingParams]) -> tuple[Host, Device, float]:
    """Run a request for each of `params` -> (host, device, seconds a step)."""
    config, device, host = EngineConfig(async_scheduling=overlap), Device(), Host()
    inputs = InputProcessor(None, 100, 100, frozenset(), SamplingParams(), 0)
    engine = LLMEngine(config, device, inputs)
    engine.observer = host
    for request_params in params:
        engine.add_request([0, 0, 0], request_params)
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            ids = list(output.outputs[0].token_ids)
            assert ids == list(range(3, 3 + len(ids)))  # The same with and without overlap.
            host.returned += len(ids)
    return host, device, 2 * (time.perf_counter() - start) / len(host.events)


def draw(overlap: bool, host: Host, device: Device) -> None:
    """Draw what host and device did for four steps, after the first two."""
    begin = host.spans[2][0]
    lanes = [
        (who, [(1e3 * (a - begin), 1e3 * (b - a), f"{what} {i}", color) for i, (a, b) in spans])
        for who, what, spans, color in (
            ("host", "plan", enumerate(host.spans[2:6], 3), 1),
            ("device", "step", enumerate(device.spans[2:6], 3), 2),
        )
    ]
    show_lanes(f"Measured with async_scheduling={overlap}", lanes, "ms")


def show_overlap(params: list[SamplingParams]) -> None:
    say(f"""The real LLMEngine runs two requests on a device without a model, which takes
        {DEVICE_SECONDS * 1e3:g} ms for a step, and the host takes {HOST_SECONDS * 1e3:g} ms for
        each plan. One request ends at a stop token, the other at max_tokens.""")
    rows, steps = [], []
    for overlap in (False, True):
        host, device, seconds = serve(overlap, params)
        draw(overlap, host, device)
        print(f"async_scheduling={overlap}: {', '.join(host.events[:7])} ...")
        assert device.sampled == host.returned + host.dropped
        steps.append(seconds * 1e3)
        rows.append((overlap, f"{steps[-1]:.1f}", device.sampled, host.returned, host.dropped))
    print()
    head = ("async_scheduling", "ms a step", "tokens sampled", "returned", "dropped")
    show_table(head, rows)
    alone, both = DEVICE_SECONDS * 1e3, (DEVICE_SECONDS + HOST_SECONDS) * 1e3
    say(f"""A step takes {steps[0]:.1f} ms without overlap, when the device and the host work in
        turn ({both:g} ms at least), and {steps[1]:.1f} ms with it, when the slower of the two
        decides ({alone:g} ms at least). The price: step N+1 is planned when the tokens of step N
        are counted but not known. A sequence that sampled a stop token is computed once more, and
        the token is dropped.""")


def run() -> None:
    by_token, by_length = SamplingParams(stop_token_ids=[20]), SamplingParams(max_tokens=40)
    QUESTIONS.show(1)
    show_overlap([by_token, by_length])
    say("""A token that the host does not know yet is a placeholder of the sequence: it is counted,
        and its value is in the runner's row only. On a CPU the default is no overlap, because the
        host computes the step itself.""")
    show_source(
        link(LLMEngine.run_step, "self.async_scheduling"),
        link(Scheduler.schedule, "num_output_placeholders += 1"),
        link(Rows.record, "self.last_tokens"),
        link(Scheduler.commit, "Status.FINISHED"),
    )


QUESTIONS = Questions("""
    With overlap, one token is dropped for a request that ends at a stop token, and none for a
    request that ends at max_tokens. Why?
    (a) The stop token is not part of the output.
    (b) The host can count tokens before it reads them, but it must read them to find a stop token,
    and the next step has been launched by then.
    (c) Tokens after max_tokens are not sampled, because the row is masked.
    Answer: b. The end at max_tokens is known when the next step is planned. A stop token is found
    one step later.
    Hint: What does the host know about a step that is in flight?
""")
