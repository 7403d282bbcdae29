"""Dissects steps of an engine: the time of each kernel, and the time in which none runs."""

import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams
from tools.benchmarks.gpu.rows import Row, headline
from tools.benchmarks.workloads import SHAPES, write_shape

SHAPE = "qwen3-0.6b"
ROWS = (1, 16, 64, 256)
CONTEXT, STEPS, CHUNK, CHUNK_ROWS = 600, 20, 64, 64
# What a kernel does, by its name; the first match counts.
KINDS = {
    "attention": "_attend|_merge_splits",
    "products": "gemm|gemv|cutlass|nvjet|cublas|splitK|linear|few_rows",
}


def rows(name: str, **options: Any) -> Iterator[Row]:
    """Yield the kernels of a decode step and its sums, for each of ROWS, and a step with a chunk.

    options: options of LLM(), for which `name` stands.
    """
    rng = random.Random(0)
    with TemporaryDirectory() as directory:
        path = str(write_shape(SHAPE, Path(directory)))
        fixed: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy"}
        fixed |= {"skip_tokenizer_init": True, "max_num_seqs": max(ROWS)}
        llm = LLM(path, **fixed, **options)

    def add(length: int, max_tokens: int) -> None:
        ids = [rng.randrange(min(10_000, SHAPES[SHAPE][6])) for _ in range(length)]
        params = SamplingParams(temperature=0.6, max_tokens=max_tokens, ignore_eos=True)
        llm.engine.add_request(ids, params)

    def run(steps: int = STEPS) -> float:
        """Return the seconds of a step."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            llm.engine.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    def decode(num: int) -> None:
        """Bring `num` requests to their decode."""
        for _ in range(num):
            add(CONTEXT, 20 * STEPS)
        while llm.engine.stats()["waiting"]:
            llm.engine.step()
        run()

    for num in ROWS:
        decode(num)
        found = kernel_times(run)
        by_time = sorted(found.items(), key=lambda item: -item[1][1])
        for kernel, (count, seconds) in by_time[:20]:
            row: Row = {"kernel": kernel[:60], "step": f"{name}, {num} rows"}
            row |= {"launches": count / STEPS, "us each": 1e6 * seconds / count}
            yield row | {"us per step": 1e6 * seconds / STEPS}
        yield headline({"step": f"{name}, {num} rows"} | sums(found, STEPS, run()))
        llm.engine.abort_all()

    decode(CHUNK_ROWS)
    host, wall = [], []
    for _ in range(5):
        add(CHUNK, 1)
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.engine.step()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        wall.append(time.perf_counter() - start)
    add(CHUNK, 1)
    found = kernel_times(lambda: run(1))
    row = {"step": f"{name}, a chunk of {CHUNK} and {CHUNK_ROWS} decodes"}
    row |= {"host us": 1e6 * median(host)}
    yield headline(row | sums(found, 1, median(wall)))


def kernel_times(run: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """Return kernel -> (launches, seconds)."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    return {event.key: (event.count, event.self_device_time_total / 1e6) for event in events}


def sums(found: dict[str, tuple[int, float]], steps: int, wall: float) -> Row:
    """Return microseconds of a step; the gaps are negative if kernels overlap."""
    row = {"wall us": 1e6 * wall} | dict.fromkeys(
        (*(f"{kind} us" for kind in KINDS), "rest us"), 0.0
    )
    for kernel, (_, seconds) in found.items():
        kinds = [kind for kind, names in KINDS.items() if re.search(names, kernel, re.IGNORECASE)]
        row[f"{[*kinds, 'rest'][0]} us"] += 1e6 * seconds / steps
    row["gaps us"] = 1e6 * (wall - sum(seconds for _, seconds in found.values()) / steps)
    return row | {"launches": sum(count for count, _ in found.values()) / steps}
