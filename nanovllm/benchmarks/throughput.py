"""Throughput: the engine and its baselines in turns on one workload.

Given: the command line, parsed. Owns: the engine, the baselines and a temporary directory, while it
runs. Returns a Report.
"""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
from tqdm import tqdm

from nanovllm import LLM
from nanovllm.benchmarks.baselines import Baseline, load_hf_model, make_hf, start_vllm
from nanovllm.benchmarks.measure import Run, run_ours, where
from nanovllm.benchmarks.noise import Neighbours
from nanovllm.benchmarks.process import peak, reset_peak
from nanovllm.benchmarks.report import Report, Row, Timed, describe_machine, one_line
from nanovllm.benchmarks.roofline import floor, kv_token_bytes, measure_rates, need
from nanovllm.benchmarks.shapes import check_fits, write_shape, write_weights
from nanovllm.benchmarks.workloads import WORKLOADS, Workload, make_workload
from nanovllm.checkpoint import EMBEDDED, config_file, find_checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.runner.choose import pick_device, pick_dtype


def throughput(args: argparse.Namespace, options: dict[str, Any], command: str) -> Report:
    """Raises ValueError for what cannot work, before anything long is run."""
    with tempfile.TemporaryDirectory(prefix="nanovllm-bench-") as temporary:
        return _throughput(args, options, command, Path(temporary))


def _throughput(
    args: argparse.Namespace, options: dict[str, Any], command: str, temporary: Path
) -> Report:
    # 1. The checkpoint and the requests, checked before anything is loaded.
    numbers = ("input", "output", "prefix", "turns")
    given = {n: getattr(args, n) for n in numbers if getattr(args, n) is not None}
    spec = WORKLOADS[args.workload]
    spec = replace(spec, **given, count=args.num_seqs or spec.count)
    shape = args.shape or (None if args.model else spec.model)
    model = shape or args.model or EMBEDDED
    engine = EngineConfig.from_options({"dtype": args.dtype, **options})  # type: ignore[typeddict-item]
    device = pick_device(engine.device)
    directory = write_shape(shape, temporary) if shape else find_checkpoint(model)
    config = ModelConfig.from_file(config_file(directory))
    dtype = pick_dtype(engine.dtype, device, config.dtype)
    beside_embedded = ["hf", "hf-batch"] if model == EMBEDDED else []
    names = beside_embedded if args.baseline is None else list(dict.fromkeys(args.baseline))
    hf = [name for name in names if name.startswith("hf")]
    copies = 1 + bool(hf) + len(names) - len(hf)
    check_fits(model, config, dtype, device, copies, temporary if shape and names else None)
    work = make_workload(args.workload, spec, config.vocab_size)
    longest = min(config.max_position_embeddings, engine.max_model_len or 1 << 60)
    if work.longest > longest:
        raise ValueError(
            f"--workload {work.name} has a request of {work.longest:,} tokens, and {model} ends at "
            f"{longest:,}; lower --input, --output, --prefix or --turns, or take a --shape"
        )
    machine = describe_machine(device)
    about = (
        f"{work.name}: {spec.help}; {len(work.prompts)} requests, {work.num_input:,} tokens in, "
        f"{work.num_output:,} out, temperature {work.temperature}"
    )
    print(f"{one_line(machine)}\n{model} in {str(dtype).removeprefix('torch.')}\n{about}")

    # 2. What the machine can do, a moment before; then the engine, warm but for one short request.
    needed = need(work, config, dtype.itemsize, engine.max_num_seqs)
    rates = measure_rates(device, dtype, needed.decode_bytes // max(1, needed.steps))
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": dtype, "device": str(device)}
    if shape and names:
        write_weights(directory, dtype)
    elif shape:
        settings["load_format"] = "dummy"
    if names and device.type == "cuda":  # leave the others room for caches of their own
        tokens = max(
            sum(len(work.prompts[i]) + work.outputs[i] + 16 for i in r) for r in work.rounds
        )
        room = int(0.4 * torch.cuda.mem_get_info(device)[0])
        enough = tokens * kv_token_bytes(config, dtype.itemsize)
        settings["kv_cache_memory_bytes"] = min(enough, room)
    start = time.perf_counter()
    llm = LLM(str(directory), **{**settings, **options, "dtype": dtype})
    loaded = time.perf_counter() - start
    warm = Workload("warm-up", [work.prompts[0][:32]], [4], [[0]])
    run_ours(llm, warm)

    # 3. In turns. The others are loaded after our first turn, whose peak of memory is ours alone.
    hf_model = cache(lambda: load_hf_model(directory, dtype, device))

    def start_baseline(name: str) -> Baseline:
        if name in hf:
            return make_hf(name, hf_model(), work, args.sample, args.batch_size)
        python, seats = args.peer_python, engine.max_num_seqs
        return start_vllm(name, python, directory, dtype, device, work, seats)

    runs: list[Run] = []
    ours = Row("nanovllm", "", work.num_input, work.num_output, [])
    beside: dict[str, tuple[Baseline, Row]] = {}
    failed: list[str] = []
    with ExitStack() as stack:
        bar = tqdm(total=args.repeats * (1 + len(names)), desc="Turns", unit="turn", delay=1)
        stack.enter_context(bar)
        for turn in range(args.repeats):
            bar.set_postfix_str("nanovllm")
            neighbours = Neighbours()
            reset_peak(device)
            runs.append(run_ours(llm, work))
            ours.repeats.append(Timed(runs[-1].seconds, neighbours.share()))
            if turn == 0:
                peak_memory = peak(device)
            bar.update()
            for name in names:
                if name in failed:
                    continue
                bar.set_postfix_str(name)
                try:
                    if turn == 0:
                        baseline = start_baseline(name)
                        stack.callback(baseline.close)
                        baseline.run(warm)
                        part = baseline.workload
                        row = Row(name, baseline.note, part.num_input, part.num_output, [])
                        beside[name] = baseline, row
                    baseline, row = beside[name]
                    neighbours = Neighbours(baseline.pids)
                    row.repeats.append(Timed(baseline.run(baseline.workload), neighbours.share()))
                    bar.update()
                except Exception as error:  # whatever a peer raises is about the peer
                    print(f"{name} is left out, for it failed: {error}", file=sys.stderr)
                    failed.append(name)
                    beside.pop(name, None)

    # 4. Where the time went: all of a short run; of a long one, steps from its middle.
    middle = next(r for r in runs if r.seconds == median_high(r.seconds for r in runs))
    first, last = 0, len(middle.steps)
    if last > 100 and (device.type == "cuda" or middle.seconds > 30):
        first = min(last // 2, 400)
        last = first + 100
    return Report(
        command=command,
        machine=machine,
        model=model,
        dtype=str(dtype).removeprefix("torch."),
        about=about,
        rows=[ours, *(row for _, row in beside.values())],
        failed=failed,
        run=middle,
        where=where(llm, work, first, last),
        rates=rates,
        need=needed,
        floor=floor(needed, rates),
        load_seconds=loaded,
        peak_memory=peak_memory,
    )
