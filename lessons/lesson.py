"""Functions that the lessons share: the embedded model, plans written by hand, and timing."""

import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.observer import Observer
from nanovllm.engine.scheduler import InFlightStep
from nanovllm.loading.checkpoint import Checkpoint
from nanovllm.models.model_config import ModelConfig
from nanovllm.outputs import RequestOutput
from nanovllm.plan import Chunk, NewRow, ResultKind, RowSampling, StepOutput, StepPlan
from tools.benchmarks.workloads import write_shape

GREEDY = RowSampling(temperature=0, seed=0)  # always the most likely token


def timed(function: Callable[[], Any], repeats: int = 3) -> tuple[Any, float]:
    """Call a function several times. Returns its last result, and the seconds of the fastest."""
    seconds = []  # other programs only make a call slower
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def make_llm(**options: Any) -> LLM:
    """Load the embedded model on the CPU in float32, where near-ties do not change tokens."""
    return LLM(**{"dtype": "float32", "device": "cpu", "max_logprobs": -1, **options})


def ask(llm: LLM, prompts: Sequence[Any], **params: Any) -> list[RequestOutput]:
    """Call `llm.generate` with these fields of SamplingParams. The default is greedy."""
    return llm.generate(prompts, SamplingParams(**{"temperature": 0} | params), use_tqdm=False)


def next_logprobs(llm: LLM, prompt: str) -> torch.Tensor:
    """Return the log-probabilities of all tokens after a prompt [V]."""
    positions: Any = ask(llm, [prompt], max_tokens=1, logprobs=-1)[0].outputs[0].logprobs
    return torch.tensor([positions[0][token].logprob for token in range(len(positions[0]))])


@dataclass
class Counters(Observer):
    """Counts what the steps of an engine compute; see nanovllm/engine/observer.py."""

    llm: LLM
    tokens: list[int] = field(default_factory=list)  # of each step
    running: list[list[str]] = field(default_factory=list)  # requests with a row in each step
    results: list[list[str]] = field(default_factory=list)  # those that each step gave a token
    blocks: int = 0  # largest number that sequences owned

    def scheduled(self, step: InFlightStep | None) -> None:
        if step is not None:
            self.tokens.append(step.plan.num_tokens)
            self.running.append([s.request_id for s in self.llm.engine.scheduler.running])
            self.blocks = max(self.blocks, int(self.llm.stats()["blocks_in_use"]))

    def committed(self, step: InFlightStep, updated: list[Any], output: StepOutput) -> None:
        self.results.append([seq.request_id for seq in updated])


def runner_of(llm: LLM) -> Any:
    """Return the ModelRunner."""
    return llm.engine.runner


def shape_of(name: str, **sizes: Any) -> ModelConfig:
    """Return the config of a model of SHAPES, such as "qwen3-0.6b", with other `sizes`."""
    with TemporaryDirectory() as directory:
        config = Checkpoint(write_shape(name, Path(directory))).model_config
    return replace(config, **sizes)


def prompt_plan(prompts: Sequence[list[int]], tables: Sequence[list[int]]) -> StepPlan:
    """Return the plan of a step that computes prompt i in row i, in the blocks of table i."""
    rows = range(len(prompts))
    return StepPlan(
        new_rows=[NewRow(row, tables[row], GREEDY) for row in rows],
        chunks=[Chunk(row, 0, prompts[row], ResultKind.TOKEN) for row in rows],
        num_tokens=sum(map(len, prompts)),
    )


def decode_plan(num_rows: int) -> StepPlan:
    """Return the plan of a step that computes the next token of the rows 0, 1, ..."""
    return StepPlan(decode_rows=list(range(num_rows)), num_tokens=num_rows)


def optional(module: str) -> Any:
    """Import a module. Returns None if it needs a package that is not installed."""
    # Without a GPU, kernels run in Triton's interpreter. Triton reads this when it is imported.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
