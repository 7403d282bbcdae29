"""What the lessons run: the embedded model, runners, plans that are written by hand, and timing."""

import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from nanovllm import LLM
from nanovllm.config import EMBEDDED, EngineConfig
from nanovllm.models.checkpoint import config_file, find_checkpoint
from nanovllm.models.config import ModelConfig
from nanovllm.plan import Chunk, Join, RowSampling, StepPlan, Yield
from nanovllm.runner import start
from nanovllm.runner.model_runner import ModelRunner

T = TypeVar("T")
GREEDY = RowSampling(temperature=0, seed=0)  # always the most likely token


def timed(function: Callable[[], T], repeats: int = 3) -> tuple[T, float]:
    """Call it `repeats` times. Returns the last result and the median of the seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def make_llm(**options: Any) -> LLM:
    """The embedded model in float32, in which near-ties do not change tokens, on the CPU."""
    return LLM(**({"dtype": "float32", "device": "cpu"} | options))


def runner_of(llm: LLM) -> ModelRunner:
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    return runner


def embedded_config() -> ModelConfig:
    return ModelConfig.from_file(config_file(find_checkpoint(EMBEDDED)))


def make_runner(
    model: ModelConfig | None, max_model_len: int, capture: Any = None, **options: Any
) -> ModelRunner:
    """A ModelRunner without an engine: of the embedded model, or with load_format="dummy" of another."""
    config, directory = EngineConfig(device="cpu", **options), find_checkpoint(EMBEDDED)
    return start.make_runner(config, model or embedded_config(), directory, max_model_len, capture)


def prompt_plan(prompts: Sequence[list[int]], tables: Sequence[list[int]]) -> StepPlan:
    """The plan of a step that computes whole prompts, each in the blocks of its table.

    Prompt i takes row i and samples greedily.
    """
    rows = range(len(prompts))
    return StepPlan(
        joins=[Join(row, tables[row], GREEDY) for row in rows],
        chunks=[Chunk(row, 0, prompts[row], Yield.TOKEN) for row in rows],
        num_tokens=sum(map(len, prompts)),
    )


def decode_plan(num_rows: int) -> StepPlan:
    """The plan of a step that computes the next token of the rows 0, 1, ..."""
    return StepPlan(decode_rows=list(range(num_rows)), num_tokens=num_rows)


def optional(module: str) -> Any:
    """Import a module; None if the package that it needs, Triton or Numba, is not installed.

    Without a GPU, Triton's kernels run in its interpreter. Triton reads TRITON_INTERPRET when it is
    imported and when a kernel is defined, so it is set before both.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
