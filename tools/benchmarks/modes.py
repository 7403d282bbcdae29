"""Measurements of bench.py other than throughput: host time and memory."""

import argparse
import random
import time
import tracemalloc
from collections.abc import Callable
from statistics import median
from typing import Any

import psutil
import torch
from tqdm import tqdm

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.progress import Progress
from nanovllm.engine.sampling import Sampling
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import RowSampling, StepOutput, StepPlan
from nanovllm.runner.rows import Rows


class NoModel:
    """A runner without a model. Every sampled token is 1."""

    num_blocks = 4096
    async_scheduling = False

    def run(self, plan: StepPlan) -> Callable[[], StepOutput]:
        num_tokens = sum(chunk.result_kind is not None for chunk in plan.chunks)
        num_tokens += len(plan.decode_rows)
        return lambda: StepOutput([1] * num_tokens)


def many(counts: tuple[int, ...] = (1000, 1_000_000)) -> None:
    """Show that the host's work for a step does not depend on how many requests wait."""
    print("\nrequests of 20 token ids and 8 output tokens without a model, 256 at a time")
    print(f"{'requests':>9}{'added per s':>13}{'us per step':>13}{'bytes of a waiting one':>24}")
    rng = random.Random(0)
    params = SamplingParams(max_tokens=8)
    for n in counts:
        input_processor = InputProcessor(None, 10_000, 1024, frozenset(), SamplingParams(), 0)
        input_processor.make_task = Sampling
        engine = LLMEngine(EngineConfig(max_num_seqs=256), NoModel(), input_processor)
        pairs = [(rng.choices(range(10_000), k=20), params) for _ in range(n)]
        tracemalloc.start()
        requests = input_processor.check(pairs[:10_000], Progress())
        engine.add(requests)
        size = tracemalloc.get_traced_memory()[0] / len(requests)
        tracemalloc.stop()
        engine.abort_all()
        requests.clear()
        num_steps = 0
        start = time.perf_counter()
        requests = input_processor.check(pairs, Progress())
        engine.add(requests)
        added = time.perf_counter()
        for _ in engine.run(requests):
            num_steps += 1
        step = 1e6 * (time.perf_counter() - added) / num_steps
        print(f"{n:9,}{n / (added - start):13,.0f}{step:13.1f}{size:24,.0f}")


def host_only(args: argparse.Namespace, options: dict[str, Any], steps: int = 200) -> None:
    """Measure the host's work for a decode step."""
    if args is not None and args.workload == "many":
        many()
        return
    torch.set_num_threads(1)
    print("\nhost time of a decode step without a model, in us, after prompts of 1,000 tokens")
    print(f"{'sequences':>9}{'schedule':>12}{'build batch':>13}{'commit':>10}{'sum':>10}")
    rng = random.Random(0)
    blocks = -(-(1000 + steps) // 16) + 1  # the blocks of a sequence
    for n in (1, 64, 256, 1024):
        scheduler = Scheduler(BlockManager(n * blocks, 16), n, n * 1000)
        rows = Rows(n, blocks, 16, torch.device("cpu"))
        for i in range(n):
            ids = [rng.randrange(10_000) for _ in range(1000)]
            stop = frozenset({10_001})
            sampling = RowSampling(temperature=0.6, seed=i)
            scheduler.add(Sequence(str(i), i, ids, 1000, 1010 + steps, stop, sampling))
        tokens = torch.arange(n)
        sampled = list(range(n))
        times = []
        for _ in range(steps + 1):
            start = time.perf_counter()
            step = scheduler.schedule()
            scheduled = time.perf_counter()
            assert step is not None
            rows.apply(step.plan)
            batch = rows.build(step.plan)
            rows.record(batch.sampling_rows, tokens)
            built = time.perf_counter()
            scheduler.commit(step, sampled)
            times.append((scheduled - start, built - scheduled, time.perf_counter() - built))
        # The first step computes the prompts.
        parts = [1e6 * median(part) for part in zip(*times[1:], strict=True)]
        print(f"{n:9}{parts[0]:12.1f}{parts[1]:13.1f}{parts[2]:10.1f}{sum(parts):10.1f}")


def memory(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Measure the memory of the process over 10,000 requests, after 1,000 to fill the KV cache."""
    settings: dict[str, Any] = {"device": "cpu", "num_kv_cache_blocks": 1024}
    llm = LLM(**settings | options)
    rng = random.Random(0)
    lines = ["host memory while the embedded model runs requests on the CPU"]
    params = SamplingParams(temperature=0.6, max_tokens=4, ignore_eos=True)
    for served in tqdm(range(-1000, 10_001, 200), desc="Batches of 200 requests"):
        if served in (0, 5000, 10_000):
            size = psutil.Process().memory_info().rss / 2**20
            lines.append(f"{served:9,} requests {size:9,.1f} MiB")
        prompts = [[rng.randrange(1000) for _ in range(16)] for _ in range(200)]
        llm.generate(prompts, params, use_tqdm=False)
    print("\n" + "\n".join(lines))
