"""Many requests wait: the work of a step is counted, because times depend on the machine."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sampling import Sampling
from tools.benchmarks.modes import NoModel

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def work_of(function: Callable[[], Any]) -> int:
    """Return the number of Python's instructions that it runs."""
    number = 0

    def note(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal number
        number += 1
        frame.f_trace_opcodes = True
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        function()
    finally:
        sys.settrace(before)
    return number


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_a_step_does_as_much_with_many_waiting(policy: str) -> None:
    works = []
    for count in (100, 10_000):
        inputs = InputProcessor(None, 1000, 128, frozenset(), SamplingParams(), 0)
        inputs.make_task = Sampling
        config = EngineConfig(max_num_seqs=8, scheduling_policy=policy)
        engine = LLMEngine(config, NoModel(), inputs)
        requests = [engine.submit([i % 999, 7, 8, 9], PARAMS) for i in range(count)]
        steps = engine.run(requests)
        for _ in range(4):  # the first requests end, and others take their rows in the next step
            next(steps)
        works.append(work_of(lambda steps=steps, engine=engine: (next(steps), engine.stats())))
    few, many = works
    assert many <= 1.05 * few
