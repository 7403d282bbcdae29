"""Engines on a runner without a model, which has the oracle's memory."""

import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from lessons.oracle.oracle import ALPHABET, OracleRunner
from nanovllm import LLM, SamplingParams
from nanovllm.loading import make_engine as loading
from nanovllm.models.backend import Backend
from nanovllm.plan import StepOutput

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": ALPHABET,
    "hidden_size": 8,
    "head_dim": 2,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 64,
}


class FakeRunner:
    """Stands in ModelRunner's place and notes what is done, (what, which step), in order."""

    num_blocks, async_scheduling, device = 40, False, torch.device("cpu")
    host_pool: SimpleNamespace | None = None
    states = None
    backend = Backend(device, torch.float32)

    def __init__(
        self, _: object, config: object, files: object, name: str, max_model_len: int, ranks: object
    ) -> None:
        self.model = SimpleNamespace(config=config)
        self.max_model_len = min(max_model_len, 4 * self.num_blocks)
        self.oracle = OracleRunner(self.num_blocks, 4, 8)
        self.events: list[tuple[str, int]] = []
        self.steps = itertools.count()
        self.drawn: list[int] = []  # how many tokens each step drew

    def run(self, plan) -> Callable[[], StepOutput]:
        step, tokens = next(self.steps), self.oracle.run(plan)
        self.events.append(("run", step))
        self.drawn.append(len(tokens))

        def wait() -> StepOutput:
            self.events.append(("wait", step))
            return StepOutput(tokens)

        return wait


@pytest.fixture
def make(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(loading, "make_runner", FakeRunner)

    def llm(asynchronous: bool, **options: object) -> LLM:
        settings = dict(block_size=4, max_num_seqs=8, skip_tokenizer_init=True)
        settings |= dict(load_format="dummy", async_scheduling=asynchronous) | options
        made = LLM(str(tmp_path), **settings)
        engine = made.engine
        schedule, steps = engine.scheduler.schedule, itertools.count()

        def noted():
            plan = schedule()
            if plan is not None:
                engine.runner.events.append(("schedule", next(steps)))
            return plan

        engine.scheduler.schedule = noted
        return made

    return llm


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(temperature=0, seed=3, **{"ignore_eos": True, **options})
