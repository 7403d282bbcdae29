"""Lesson 11a: overlap of host and device.

Kernels make steps short, and then the time of the host counts. A GPU works asynchronously: the host
only launches its work. If the host waits for the tokens of a step before it plans the next one, the
GPU is idle while the host plans. If a step takes 5 ms and a plan 3 ms, the GPU is idle
for 3 of 8 ms. With async scheduling, step N+1 is planned and launched before the tokens of step N
are read (as in NanoFlow, Zhu et al. 2024, arXiv:2408.12757, and in vLLM):

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
from nanovllm.engine.sampling import Sampling
from nanovllm.plan import StepOutput, StepPlan
from tools.benchmarks.modes import NoModel

SHOWS_TIMES = True
DEVICE_MS, HOST_MS = 5, 3  # of one step


class SlowDevice(NoModel):
    """A runner whose n-th step samples token n in each row. It records plans and commits."""

    def __init__(self) -> None:
        self.queue = ThreadPoolExecutor(1)  # one step at a time, in the order of the launches
        self.events: list[str] = []
        self.steps = self.sampled = 0

    def run(self, plan: StepPlan) -> Callable[[], StepOutput]:
        time.sleep(HOST_MS / 1e3)  # as if the plan had taken so long
        self.steps += 1
        self.events.append(f"plan {self.steps}")
        tokens = [self.steps] * len(super().run(plan)().token_ids)
        self.sampled += len(tokens)
        done = self.queue.submit(time.sleep, DEVICE_MS / 1e3)

        def read() -> StepOutput:
            done.result()
            self.events.append(f"commit {tokens[0]}")
            return StepOutput(tokens)

        return read


def serve(overlap: bool) -> tuple[SlowDevice, list[list[int]], float]:
    """Run two requests -> device, outputs, milliseconds a step."""
    device = SlowDevice()
    outputs = list[list[int]]()
    inputs = InputProcessor(None, 100, 100, frozenset(), SamplingParams(), 0)
    inputs.make_task = Sampling
    engine = LLMEngine(EngineConfig(async_scheduling=overlap), device, inputs)
    for params in (SamplingParams(stop_token_ids=[18]), SamplingParams(max_tokens=40)):
        engine.add_request([0, 0, 0], params)
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs += [output.outputs[0].token_ids for output in engine.step()]
    return device, outputs, 1e3 * (time.perf_counter() - start) / device.steps


def run() -> None:
    QUESTIONS.show(1)
    say(f"""The real LLMEngine runs two requests on a device without a model, which takes
        {DEVICE_MS} ms for a step, and the host takes {HOST_MS} ms for each plan. One request ends
        at a stop token, the other at max_tokens.""")
    rows = []
    for overlap in (False, True):
        device, outputs, ms = serve(overlap)
        print(f"async_scheduling={overlap}: {', '.join(device.events[:7])} ...")
        rows.append((overlap, f"{ms:.1f}", device.sampled, sum(map(len, outputs))))
    print()
    show_table(("async_scheduling", "ms a step", "tokens sampled", "returned"), rows)
    say(f"""A step takes {rows[0][1]} ms without overlap, when the device and the host work in
        turn ({DEVICE_MS + HOST_MS} ms at least), and {rows[1][1]} ms with it, when the slower of
        the two decides ({max(DEVICE_MS, HOST_MS)} ms at least).

        Step N+1 is planned when the tokens of step N are counted but not known. What is its input?
        The plan names only the row, and the runner knows its position. The token stays on the
        device: step N writes it to `Rows.last_tokens`, where step N+1 reads it.

        The price: a sequence that sampled a stop token is computed once more, and the token of this
        step is dropped. Its blocks may be free by then. The device computes steps in order, so the
        next sequence that gets a block stores its keys and values later.""")
    show_source(
        link("engine.llm_engine.LLMEngine._run_step", "self.async_scheduling"),
        link("runner.rows.Rows.record", "self.last_tokens[rows]"),
    )
    say("""What to do: change HOST_MS in `lessons/lesson11a_overlap.py` to 5 and to 8, and say
        before each run what both ways take. On the ladder async scheduling has a rung: `python -m
        lessons ladder 11`. A CPU gains nothing, because the host computes the step itself.""")


QUESTIONS = Questions("""
    With overlap, one token is dropped for a request that ends at a stop token, and none for a
    request that ends at max_tokens. Why?
    (a) A stop token is found only when it is read.
    (b) A stop token is not a part of the output text.
    (c) At max_tokens the row of the request is masked.
    Answer: a. The host can count tokens before it reads them, so it knows the end at max_tokens
    when it plans the next step. To find a stop token it must read the tokens, and the next step has
    been launched by then.
    Hint: What does the host know about a step that is in flight?
""")

IN_VLLM = """`EngineCore.step_with_batch_queue` in `v1/engine/core.py`, and `AsyncScheduler` in
`v1/core/sched/async_scheduler.py`, which counts sampled tokens that are not read yet
(`num_output_placeholders`, the same name as here)."""
