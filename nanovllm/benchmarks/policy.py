"""The same workload under several scheduling policies: who waits, and how long.

Given: an LLM's options. A few long prompts come first and many short ones behind them.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from nanovllm import LLM, RequestOutput, SamplingParams


@dataclass(frozen=True)
class Figures:
    """Milliseconds."""

    mean: float
    p50: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: list[float]) -> "Figures":
        values = sorted(1000 * v for v in values)
        n = len(values)
        return cls(sum(values) / n, values[n // 2], values[min(n - 1, int(0.99 * n))], values[-1])


@dataclass(frozen=True)
class PolicyRun:
    policy: str
    waiting: Figures  # from arrival to the first step that computes any of it
    first_token: Figures  # from arrival
    tokens_per_second: float  # output tokens


def run_policy(make_llm: Callable[[str], LLM], policy: str, seed: int = 0) -> PolicyRun:
    rng = random.Random(seed)
    lengths = [(800, 32)] * 6 + [(rng.randint(16, 64), 32) for _ in range(90)]
    llm = make_llm(policy)
    size = llm.engine.model_config.vocab_size
    prompts = [[rng.randrange(size) for _ in range(length)] for length, _ in lengths]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in lengths]
    outs = llm.generate(prompts, params, use_tqdm=False)
    start = min(o.metrics.arrival_time for o in outs)
    end = max(known(o, "finished_time") for o in outs)
    return PolicyRun(
        policy,
        Figures.of([known(o, "first_scheduled_time") - o.metrics.arrival_time for o in outs]),
        Figures.of([known(o, "first_token_time") - o.metrics.arrival_time for o in outs]),
        sum(len(o.outputs[0].token_ids) for o in outs) / (end - start),
    )


def known(output: RequestOutput, name: str) -> float:
    value: float = getattr(output.metrics, name)
    return value
