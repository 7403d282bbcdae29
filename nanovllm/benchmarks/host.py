"""What a step costs the host: scheduling, building the batch, commit, on a runner that computes nothing.

Given: nothing. Everything is made here: sequences of 1,000 tokens that decode, block size 16.
"""

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import RowSampling, StepPlan
from nanovllm.runner.batch import RowBuffers

BLOCK = 16


def make_sequence(arrival: int, prompt: list[int], output: int) -> Sequence:
    sampling = RowSampling(temperature=0.6, top_k=0, top_p=1.0, min_p=0.0, seed=arrival)
    length = len(prompt) + output
    return Sequence(
        str(arrival), arrival, prompt, len(prompt), length, frozenset({10_001}), sampling
    )


@dataclass(frozen=True)
class HostCost:
    """Median microseconds of a decode step's parts."""

    sequences: int
    schedule: float
    build: float
    commit: float


def host_cost(sequences: int, length: int = 1000, steps: int = 200) -> HostCost:
    blocks = BlockManager(sequences * (-(-(length + steps) // BLOCK) + 1), BLOCK)
    scheduler = Scheduler(blocks, sequences, sequences * length)
    rows = RowBuffers(
        sequences, -(-(length + steps) // BLOCK) + 1, BLOCK, 10_000, torch.device("cpu")
    )
    rng = random.Random(0)
    for i in range(sequences):
        prompt = [rng.randrange(10_000) for _ in range(length)]
        scheduler.add(make_sequence(i, prompt, steps + 10))
    tokens = [rng.randrange(10_000) for _ in range(sequences)]
    drawn = torch.tensor(tokens)

    def step() -> tuple[float, float, float]:
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        assert plan is not None
        rows.apply(plan)
        rows.build(plan)
        rows.drawn(drawn)
        built = time.perf_counter()
        scheduler.commit(plan, tokens)
        return scheduled - start, built - scheduled, time.perf_counter() - built

    step()  # the prompts
    gc.collect()
    parts = [step() for _ in range(steps)]
    schedule, build, commit = (median(p) * 1e6 for p in zip(*parts, strict=True))
    return HostCost(sequences, schedule, build, commit)


@dataclass(frozen=True)
class PoolRun:
    """What a workload on a pool of half the blocks that it could use did."""

    steps: int
    recomputed: float  # share of the tokens computed
    preemptions: int


# How many blocks admission leaves free, other than what the scheduler itself does.
HEAD_ROOMS: dict[str, Callable[[Scheduler], int]] = {
    "none": lambda s: 0,
    "1 % of the pool": lambda s: s.blocks.num_blocks // 100,
    "half a block a sequence": lambda s: len(s.running) // 2,
    "two blocks a sequence": lambda s: 2 * len(s.running),
    "four blocks a sequence": lambda s: 4 * len(s.running),
}


def half_pool(seed: int = 0, head_room: str | None = None) -> PoolRun:
    """256 requests, prompts and outputs of 100 to 1,024 tokens, on the scheduler alone."""
    rng = random.Random(seed)
    lengths = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]
    blocks = BlockManager(sum(-(-(p + o) // BLOCK) for p, o in lengths) // 2, BLOCK)
    scheduler = Scheduler(blocks, 256, 8192)
    if head_room is not None:
        scheduler.head_room = partial(HEAD_ROOMS[head_room], scheduler)  # type: ignore[method-assign]
    for i, (prompt, output) in enumerate(lengths):
        scheduler.add(make_sequence(i, [rng.randrange(10_000) for _ in range(prompt)], output))
    steps = computed = 0
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan is not None
        computed += plan.num_tokens
        scheduler.commit(plan, [7] * num_drawn(plan))
        steps += 1
    return PoolRun(steps, scheduler.recomputed_tokens / computed, scheduler.preemptions)


def num_drawn(plan: StepPlan) -> int:
    return len(plan.decode_rows) + sum(c.sample for c in plan.chunks)
