"""Throughput: the engine and its baselines in turns on one workload, from what was asked to a Report.

Given: what was asked. Owns: the engine and the baselines while it runs. Writes to `temporary` alone.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

from nanovllm import LLM
from nanovllm.benchmarks.baselines import Baseline, load_hf_model, make_hf, start_vllm
from nanovllm.benchmarks.measure import Run, run_ours, where
from nanovllm.benchmarks.noise import Neighbours
from nanovllm.benchmarks.process import peak, reset_peak
from nanovllm.benchmarks.report import Report, Row, Timed, about, describe_machine, one_line
from nanovllm.benchmarks.roofline import floor, kv_token_bytes, measure_rates, need
from nanovllm.benchmarks.shapes import check_fits, write_shape, write_weights
from nanovllm.benchmarks.workloads import Spec, Workload, make_workload
from nanovllm.checkpoint import config_file, find_checkpoint
from nanovllm.config import ModelConfig
from nanovllm.runner.model_runner import pick_device, pick_dtype


@dataclass(frozen=True)
class Asked:
    command: str
    workload: str
    spec: Spec
    shape: str | None
    model: str
    dtype: str
    options: dict[str, Any]  # of the engine
    baselines: list[str]
    peer_python: str | None
    repeats: int
    sample: int | None
    batch_size: int
    temporary: Path


def throughput(asked: Asked) -> tuple[Report, bool]:
    """The report, and whether a baseline failed. Raises ValueError before anything long is run."""
    # 1. The checkpoint and the requests, checked before anything is loaded.
    directory = (
        write_shape(asked.shape, asked.temporary) if asked.shape else find_checkpoint(asked.model)
    )
    config = ModelConfig.from_file(config_file(directory))
    device = pick_device(asked.options.get("device", "auto"))
    dtype = pick_dtype(asked.dtype, device, config.dtype)
    hf = [b for b in asked.baselines if b.startswith("hf")]
    copies = 1 + bool(hf) + len(asked.baselines) - len(hf)
    on_disk = asked.temporary if asked.shape and asked.baselines else None
    check_fits(asked.model, config, dtype, device, copies, on_disk)
    work = make_workload(asked.workload, asked.spec, config.vocab_size)
    longest = min(config.max_position_embeddings, asked.options.get("max_model_len") or 1 << 60)
    if work.longest > longest:
        raise ValueError(
            f"--workload {work.name} has a request of {work.longest:,} tokens, and {asked.model} ends at "
            f"{longest:,}; lower --input, --output, --prefix or --turns, or take a --shape"
        )
    machine, told = describe_machine(device), about(work, asked.spec.about)
    print(f"{one_line(machine)}\n{asked.model} in {str(dtype).removeprefix('torch.')}\n{told}")

    # 2. What the machine can do, a moment before; then the engine, warm but for one short request.
    needed = need(work, config, dtype.itemsize, asked.options.get("max_num_seqs", 256))
    a_step = needed.weight_bytes + needed.kv_bytes // max(1, needed.steps)
    rates = measure_rates(device, dtype, a_step)
    options = asked.options | {
        "skip_tokenizer_init": True,
        "dtype": str(dtype),
        "device": str(device),
    }
    if on_disk is not None:
        write_weights(directory, dtype)
    elif asked.shape:
        options["load_format"] = "dummy"
    if asked.baselines and device.type == "cuda":  # leave the others room for caches of their own
        tokens = max(
            sum(len(work.prompts[i]) + work.outputs[i] + 16 for i in r) for r in work.rounds
        )
        room = int(0.4 * torch.cuda.mem_get_info(device)[0])
        enough = tokens * kv_token_bytes(config, dtype.itemsize)
        options.setdefault("kv_cache_memory_bytes", min(enough, room))
    start = time.perf_counter()
    llm = LLM(str(directory), **options)
    loaded = time.perf_counter() - start
    warm = Workload("warm-up", [work.prompts[0][:32]], [4], [[0]])
    run_ours(llm, warm)

    # 3. In turns. The others are loaded after our first turn, whose peak of memory is ours alone.
    failed = False

    def start_baselines() -> list[tuple[Baseline, Row]]:
        nonlocal failed
        model = load_hf_model(directory, dtype, device) if hf else None
        found = []
        for name in asked.baselines:
            try:
                if name in hf:
                    baseline = make_hf(name, model, work, asked.sample, asked.batch_size)
                else:
                    seats = options.get("max_num_seqs", 256)
                    python = str(asked.peer_python)
                    baseline = start_vllm(name, python, directory, dtype, device, work, seats)
                baseline.run(warm)
            except Exception as error:  # whatever a peer raises is about the peer
                failed = left_out(name, error)
                continue
            part = baseline.workload
            found.append((baseline, Row(name, baseline.note, part.num_input, part.num_output, [])))
        return found

    ours = Row("nanovllm", "", work.num_input, work.num_output, [])
    runs: list[Run] = []
    beside: list[tuple[Baseline, Row]] = []
    try:
        for turn in range(asked.repeats):
            reset_peak(device)
            neighbours = Neighbours()
            runs.append(run_ours(llm, work))
            ours.repeats.append(Timed(runs[-1].seconds, neighbours.share()))
            if turn == 0:
                peak_memory = peak(device)
                beside = start_baselines()
            for baseline, row in list(beside):
                neighbours = Neighbours(baseline.pids)
                try:
                    seconds = baseline.run(baseline.workload)
                except Exception as error:
                    failed = left_out(baseline.name, error)
                    baseline.close()
                    beside.remove((baseline, row))
                    continue
                row.repeats.append(Timed(seconds, neighbours.share()))
    finally:
        for baseline, _ in beside:
            baseline.close()

    # 4. Where the time went: all of a short run; of a long one, steps from its middle.
    middle = next(r for r in runs if r.seconds == median_low(r.seconds for r in runs))
    first, last = 0, len(middle.steps)
    if last > 100 and (device.type == "cuda" or middle.seconds > 30):
        first = min(last // 2, 400)
        last = first + 100
    report = Report(
        command=asked.command,
        machine=machine,
        model=asked.model,
        dtype=str(dtype).removeprefix("torch."),
        about=told,
        rows=[ours, *(row for _, row in beside)],
        run=middle,
        where=where(llm, work, first, last),
        rates=rates,
        need=needed,
        floor=floor(needed, rates),
        load_seconds=loaded,
        peak_memory=peak_memory,
    )
    return report, failed


def left_out(name: str, error: Exception) -> bool:
    print(f"{name} is left out, for it failed: {error}", file=sys.stderr)
    return True
