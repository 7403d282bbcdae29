"""Throughput: nanovllm and its baselines take turns on one workload.

The result is one dict, which --json writes unchanged. The engine has no hooks for measurements; only
`run_engine` and `profile_run` use its internals.
"""

import argparse
import cProfile
import importlib.util
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from nanovllm import LLM, SamplingParams
from nanovllm.benchmarks import baselines, machine, report, roofline, workloads
from nanovllm.benchmarks.baselines import Engine
from nanovllm.benchmarks.workloads import Workload
from nanovllm.config import EMBEDDED, EngineConfig
from nanovllm.models.checkpoint import config_file, find_checkpoint
from nanovllm.models.config import ModelConfig
from nanovllm.runner.backends import pick_device, pick_dtype
from nanovllm.runner.memory import available_host_memory

Result = dict[str, Any]


def throughput(args: argparse.Namespace, options: Result, command: str, temporary: Path) -> Result:
    """Run what the command line asks for. Raises ValueError before anything long runs."""
    # 1. Choose the checkpoint and the requests, and check them before loading anything.
    keys = ("count", "input", "output", "prefix", "turns")
    numbers = {n: number for n in keys if (number := getattr(args, n)) is not None}
    spec = replace(workloads.WORKLOADS[args.workload], **numbers)
    shape = args.shape or (None if args.model else spec.model)
    model = shape or args.model or EMBEDDED
    engine = EngineConfig.from_options(options)
    device = pick_device(engine.device)
    directory = workloads.write_shape(shape, temporary) if shape else find_checkpoint(model)
    config = ModelConfig.from_file(config_file(directory))
    dtype, cuda = pick_dtype(engine.dtype, device, config.dtype), device.type == "cuda"
    others = ["hf", "hf-batch"] if model == EMBEDDED else []
    others = others if args.baseline is None else list(dict.fromkeys(args.baseline))
    work = workloads.make_workload(args.workload, spec, config.vocab_size)
    longest = min(config.max_position_embeddings, engine.max_model_len or 1 << 60)
    if max(work.lengths) > longest:
        raise ValueError(
            f"--workload {work.name} has a request of {max(work.lengths):,} tokens, but {model} "
            f"ends at {longest:,}; lower --input, --output, --prefix or --turns, or take a --shape"
        )
    in_fp8 = engine.kv_cache_dtype != "auto"
    # In int8 a weight has one byte; the scales are not counted.
    weight_size, kv_size = (
        1 if small else dtype.itemsize for small in (engine.quantization, in_fp8)
    )
    cost = roofline.costs(work, config, weight_size, engine.max_num_seqs, kv_size)
    copies = 1 + len({"hf" if name.startswith("hf") else name for name in others})
    free = torch.cuda.mem_get_info(device)[0] if cuda else available_host_memory()
    # The remaining tenth is for the KV cache and the activations.
    if copies * cost["weight_bytes"] > 0.9 * free:
        raise ValueError(
            f"{model} takes {copies * cost['weight_bytes'] / 2**30:.1f} GiB for {copies} engines; "
            f"{free / 2**30:.1f} GiB are free; use a smaller --shape (qwen3-0.6b) or drop baselines"
        )
    about = (
        f"{work.name}: {spec.help}; {len(work.prompts)} requests; {sum(work.lengths):,} tokens, "
    )
    about += f"{sum(work.outputs):,} of them output"
    described = ", ".join(f"{key} {value}" for key, value in machine.describe(device).items())
    head = {
        "machine": described,
        "model": f"{model} in {str(dtype)[6:]}"
        f"{', weights in int8' * bool(engine.quantization)}{', KV in fp8' * in_fp8}",
        "workload": about,
    }
    print("\n".join(map(report.entry, head, head.values())), flush=True)
    result: Result = {**head, "machine": machine.describe(device), "command": command, "cost": cost}

    # 2. Measure the roofline, then load the engine.
    step_bytes = cost["decode_bytes"] // max(1, cost["decode_steps"])
    result["peak"] = roofline.measure_peak(device, dtype, step_bytes)
    settings: Result = {"skip_tokenizer_init": True, "device": str(device)}
    if shape and others:
        workloads.write_weights(directory, dtype)
    elif shape:
        settings["load_format"] = "dummy"
    if others and cuda:
        # Leave room for the KV caches of the baselines.
        settings["gpu_memory_utilization"] = 0.45
    if device.type == "cpu" and importlib.util.find_spec("numba"):
        # Otherwise the first run of a small model would use plain torch.
        importlib.import_module("nanovllm.cpu.compile").compile_now(dtype)
    start = time.perf_counter()
    llm = LLM(str(directory), **settings | options | {"dtype": dtype})
    result["load_seconds"] = time.perf_counter() - start

    # 3. Take turns. An engine starts and warms up in its first turn.
    hf_model = cache(lambda: baselines.load_hf_model(directory, dtype, device))

    @cache
    def start_engine(name: str) -> Engine:
        if name.startswith("vllm"):
            vllm: Result = {"model": str(directory), "dtype": str(dtype)[6:]}
            vllm |= {"max_num_seqs": engine.max_num_seqs, "enforce_eager": name == "vllm-eager"}
            run = partial(baselines.run_vllm, args.peer_python, vllm)
            return Engine(work, run, baselines.vllm_version(args.peer_python))
        started = Engine(work, partial(run_engine, llm))
        if name != "nanovllm":
            started = baselines.make_hf(name, hf_model(), work, args.sample, args.batch_size)
        started.run(Workload("warm-up", [work.prompts[0][:32]], [4], [[0]]))
        return started

    rows: dict[str, Result] = {}
    result["failed"] = {}
    turns = [(name, busy) for name in ("nanovllm", *others) for busy in {False, args.busy}]
    for name, busy in (bar := tqdm(turns * args.repeats, desc="Turns", unit="run")):
        shown = f"{name}+busy" if busy else name
        bar.set_postfix_str(shown)
        if name in result["failed"]:
            continue
        try:
            other = start_engine(name)
            with machine.busy_process() if busy else nullcontext():
                before = machine.cpu_seconds()
                run = other.run(other.work) | {"other_load": machine.other_load(before)}
        except Exception as error:
            # A baseline can raise any error, and the other ones can still be measured.
            if name == "nanovllm":
                raise
            result["failed"][name] = str(error)
            rows.pop(name, None)
            rows.pop(f"{name}+busy", None)
            continue
        run["output_tokens_per_second"] = sum(other.work.outputs) / run["seconds"]
        row = {"name": shown, "note": other.note, "output_tokens": sum(other.work.outputs)}
        row |= {"input_tokens": sum(map(len, other.work.prompts)), "runs": []}
        rows.setdefault(shown, row)["runs"].append(run)

    # 4. Take the run with the median time, the slower one of two; profile another run.
    runs = sorted(rows["nanovllm"]["runs"], key=lambda run: run["seconds"])
    result |= {"engines": list(rows.values()), "run": runs[len(runs) // 2]}
    result["roofline"] = roofline.bounds(cost, result["peak"])
    least = sum(seconds for seconds, _ in result["roofline"].values())
    result["roofline_share"] = least / result["run"]["seconds"]
    return result | {"seconds_by_component": profile_run(llm, work)}


def run_engine(llm: LLM, work: Workload) -> Result:
    """Run all rounds through `generate`, starting with an empty prefix cache."""
    llm.reset_prefix_cache()
    fixed: Result = {"temperature": work.temperature, "ignore_eos": True, "detokenize": False}
    outs: list[Any] = []
    steps: list[Result] = []
    schedule = llm.engine.scheduler.schedule

    def record() -> Any:
        step = schedule()
        if step is not None:
            plan, at = step.plan, time.perf_counter() - start
            sequences = len(plan.chunks) + len(plan.decode_rows)
            steps.append({"at": at, "sequences": sequences, "tokens": plan.num_tokens})
        return step

    start = time.perf_counter()
    with patch.object(llm.engine.scheduler, "schedule", record):
        for round_ in work.rounds:
            params = [SamplingParams(max_tokens=work.outputs[i], **fixed) for i in round_]
            outs += llm.generate([work.prompts[i] for i in round_], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    lengths = [len(out.outputs[0].token_ids) for out in outs]
    baselines.check_lengths("nanovllm", lengths, [work.outputs[i] for r in work.rounds for i in r])
    times = [out.metrics for out in outs]
    cuda, maxrss = torch.cuda.is_initialized(), getrusage(RUSAGE_SELF).ru_maxrss
    decode = zip([t.finished_time - t.first_token_time for t in times], lengths, strict=True)
    return {
        "seconds": seconds,
        "waiting_time_ms": quantiles([t.first_scheduled_time - t.arrival_time for t in times]),
        "time_to_first_token_ms": quantiles([t.first_token_time - t.arrival_time for t in times]),
        "time_per_output_token_ms": quantiles([s / (n - 1) for s, n in decode if n > 1]),
        "steps": steps,
        "mean_batch": mean(step["sequences"] for step in steps),
        "prefix_hit_rate": sum(o.num_cached_tokens for o in outs) / sum(map(len, work.prompts)),
        "preemptions": sum(t.num_preemptions for t in times),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else 1024 * maxrss,
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    return {f"p{q}": float(1000 * np.percentile(seconds or [0.0], q)) for q in (50, 99)}


def profile_run(llm: LLM, work: Workload) -> Result:
    """Seconds of each function (CPU) or kernel (GPU) in the first round, 100 tokens per request.

    The profiler makes the run slower. On a CPU the model runs layer by layer, even where a decode
    step is one compiled call otherwise.
    """
    runner: Any = llm.engine.runner
    cuda = torch.cuda.is_initialized()
    work = replace(work, outputs=[min(n, 100) for n in work.outputs], rounds=work.rounds[:1])
    kernels = profile(activities=[ProfilerActivity.CUDA])
    # Without entries for built-in functions, their time counts for the functions that call them.
    calls = cProfile.Profile(builtins=False)
    with patch.object(runner, "compiled_model", runner.model), kernels if cuda else calls:
        seconds = run_engine(llm, work)["seconds"]
    parts: dict[str, float] = defaultdict(float)
    for event in kernels.key_averages() if cuda else ():
        parts[event.key[:40]] += event.self_device_time_total / 1e6
    for call in () if cuda else calls.getstats():
        # The functions of other packages count for the function that calls them.
        if "/nanovllm/" in str(call.code):
            inner = (c.totaltime for c in call.calls or () if "/nanovllm/" not in str(c.code))
            code: Any = call.code
            name = f"{Path(code.co_filename).stem}.{code.co_name}"
            parts[name] += call.inlinetime + sum(inner)
    parts["GPU idle" if cuda else "other"] = max(0.0, seconds - sum(parts.values()))
    return parts
