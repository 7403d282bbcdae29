"""Runs a workload in an engine: nanovllm, or one of transformers' baselines."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.loading.checkpoint import Checkpoint
from tools.benchmarks import baselines, roofline, turn
from tools.benchmarks.gpu.rows import Row, headline
from tools.benchmarks.gpu.timing import DEVICE
from tools.benchmarks.workloads import (
    WORKLOADS,
    make_workload,
    write_shape,
    write_weights,
)

BATCH_SIZE = 64  # of static batches
PEAK_BYTES = 1 << 30  # of the buffer that is read to measure the bandwidth


def rows(
    workload: str,
    shape: str = "qwen3-0.6b",
    engine: str = "nanovllm",
    count: int | None = None,
    sample: int | None = None,
    turns: int = 2,
    **options: Any,
) -> Iterator[Row]:
    """Yield the speed of each turn, after one that is not measured, and their median.

    count: requests, instead of the workload's. sample: the most that a baseline runs.
    options: options of LLM().
    """
    given: Row = {"count": count} if count else {}
    name = ", ".join([workload, shape, engine, *(f"{k}={v}" for k, v in (given | options).items())])
    if workload not in WORKLOADS:
        yield headline({"workload": name, "note": "workloads.py has no such workload"})
        return
    spec = WORKLOADS[workload]
    spec = replace(spec, count=count or spec.count)
    with TemporaryDirectory() as directory:
        path = write_shape(shape, Path(directory))
        config = Checkpoint(path).model_config
        work = make_workload(workload, spec, config.vocab_size)
        job: Row = {"engine": engine, "directory": str(path), "device": "cuda", "dtype": "bfloat16"}
        job |= {"batch_size": BATCH_SIZE}
        if engine == "nanovllm":
            part, fixed = work, {"load_format": "dummy", "skip_tokenizer_init": True}
            job["options"] = fixed | {"device": "cuda", "dtype": "bfloat16"} | options
        else:
            part, _ = baselines.hf_part(engine, work, sample, BATCH_SIZE)
            write_weights(path, torch.bfloat16)
        loaded, measured = turn.load(job | {"work": asdict(part)})
    seconds = []
    for _ in range(turns):
        run = measured(profile=False)
        seconds.append(run["seconds"])
        row: Row = {"workload": name, "tokens/s": sum(part.outputs) / seconds[-1]}
        for time in ("time_to_first_token", "time_per_output_token"):
            for quantile, value in run.get(f"{time}_ms", {}).items():
                row[f"{time} {quantile} ms"] = value
        yield row | {"preemptions": run.get("preemptions", 0)}
    row = {"workload": name, "tokens/s": sum(part.outputs) / median(seconds)}
    if engine == "nanovllm":
        weight, value = (1 if options.get(o) else 2 for o in ("quantization", "kv_cache_dtype"))
        num_rows = options.get("max_num_seqs", EngineConfig().max_num_seqs)
        cost = roofline.costs(work, config, weight, num_rows, value)
        bounds = roofline.bounds(cost, roofline.measure_peak(DEVICE, torch.bfloat16, PEAK_BYTES))
        row["share of the roofline"] = sum(bound for bound, _ in bounds.values()) / median(seconds)
    yield headline(row | {"start s": loaded["load_seconds"]})
