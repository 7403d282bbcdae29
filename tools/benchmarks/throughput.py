"""Throughput: nanovllm and its baselines take turns on one workload.

prepare     chooses and checks the checkpoint, the requests and their costs
take_turns  starts a process for each engine, with an unmeasured run and a measured run in each turn
throughput  returns the result, a dict that --json writes unchanged
"""

import argparse
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from nanovllm.config import EMBEDDED, EngineConfig
from nanovllm.loading.checkpoint import Checkpoint, find_checkpoint
from nanovllm.loading.select_backend import pick_device, pick_dtype
from nanovllm.utils.host import available_host_memory
from tools.benchmarks import (
    baselines,
    gguf_weights,
    machine,
    report,
    roofline,
    vllm_peer,
    workloads,
)
from tools.benchmarks.turn import COMMAND, Process, Result
from tools.benchmarks.workloads import Workload


@dataclass
class Engine:
    """An engine, and the command, the input and the variables of its process."""

    name: str
    work: Workload
    command: list[str]
    job: Result
    note: str = ""
    variables: dict[str, str] = field(default_factory=dict)


@dataclass
class Setup:
    """The checked arguments of the command line."""

    work: Workload
    directory: Path
    engines: list[Engine]  # nanovllm first
    device: torch.device
    dtype: torch.dtype
    cost: dict[str, int]  # see roofline.costs
    about: dict[str, str]  # printed at the start
    writes_weights: bool  # random ones, which the baselines cannot make themselves


def throughput(args: argparse.Namespace, options: Result, command: str, temporary: Path) -> Result:
    """Run the benchmark of the command line. Raises ValueError before anything long runs."""
    setup = prepare(args, options, temporary)
    print("\n".join(map(report.entry, setup.about, setup.about.values())), flush=True)
    cost = setup.cost
    step_bytes = cost["decode_bytes"] // max(1, cost["decode_steps"])
    peak = roofline.measure_peak(setup.device, setup.dtype, step_bytes)
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()  # the engines, in other processes, need the memory
    if setup.writes_weights:
        workloads.write_weights(setup.directory, setup.dtype)
        if any(engine.name == "llama.cpp" for engine in setup.engines):
            gguf_weights.write_gguf(setup.directory, gguf_weights.TYPES[setup.dtype])

    # On a GPU each engine takes nearly all memory.
    together = setup.device.type == "cpu"
    rows, failed = take_turns(setup.engines, args.repeats, args.busy, together)
    engines = list(rows.values())
    ours = rows["nanovllm"]["runs"]
    # The run with the median time, or the slower one of two.
    run = sorted(ours, key=lambda run: run["seconds"])[len(ours) // 2]
    limits = roofline.bounds(cost, peak)
    result = {**setup.about, "machine": machine.describe(setup.device), "command": command}
    # Where each output has one token, its request is all prompt.
    result["rate_of"] = "output" if max(setup.work.outputs) > 1 else "input"
    result |= {"cost": cost, "peak": peak, "roofline": limits, "run": run, "failed": failed}
    result["roofline_share"] = sum(seconds for seconds, _ in limits.values()) / run["seconds"]
    result["load_seconds"] = median(run["load_seconds"] for run in ours)
    result["seconds_by_component"] = ours[-1].pop("seconds_by_component")
    return result | {"engines": engines}


def take_turns(
    engines: list[Engine], repeats: int, busy: bool, together: bool
) -> tuple[dict[str, Result], dict[str, str]]:
    """Run the engines in turns. Returns a row for each engine, and engine -> error.

    together: load all engines once. Otherwise each engine is loaded again for each turn.
    """
    rows: dict[str, Result] = {}
    failed: dict[str, str] = {}
    loaded: dict[str, Process] = {}
    loads = [False, True] if busy else [False]
    turns = [(i, engine, load) for i in range(repeats) for engine in engines for load in loads]
    order: list[tuple[int | None, Engine, bool]] = [
        *((None, engine, False) for engine in engines if together),
        *turns,
    ]
    try:
        for i, engine, load in (bar := tqdm(order, desc="Turns", unit="turn")):
            if engine.name in failed:
                continue
            name = f"{engine.name}+busy" if load else engine.name
            bar.set_postfix_str(f"{name}, loading" if i is None else name)
            try:
                process = loaded.get(engine.name) or Process(
                    engine.command, engine.job, engine.variables
                )
                loaded[engine.name] = process
                if i is None:
                    continue
                cpu_at_start = machine.cpu_seconds()
                with machine.busy_process() if load else nullcontext():
                    run = process.turn(profile=i == repeats - 1 and not load)
            except RuntimeError as error:
                if engine.name == "nanovllm":
                    raise
                failed[engine.name] = str(error)
                rows = {n: row for n, row in rows.items() if row["engine"] != engine.name}
                continue
            run |= process.loaded
            run["other_load"] = machine.other_load(cpu_at_start)
            row = {"name": name, "engine": engine.name, "note": engine.note, "runs": []}
            row["output_tokens"] = sum(engine.work.outputs)
            row["input_tokens"] = sum(map(len, engine.work.prompts))
            for kind in ("input", "output"):
                run[f"{kind}_tokens_per_second"] = row[f"{kind}_tokens"] / run["seconds"]
            rows.setdefault(name, row)["runs"].append(run)
            if not together:
                loaded.pop(engine.name).end()
    finally:
        for process in loaded.values():
            process.end()
    return rows, failed


def prepare(args: argparse.Namespace, options: Result, temporary: Path) -> Setup:
    """Choose the checkpoint and the requests, and check them. Raises ValueError."""
    keys = ("count", "input", "output", "prefix", "turns")
    numbers = {n: number for n in keys if (number := getattr(args, n)) is not None}
    spec = replace(workloads.WORKLOADS[args.workload], **numbers)
    if spec.chats and (numbers or args.model or args.shape):
        extra = next(iter(numbers), "model" if args.model else "shape").replace("count", "num-seqs")
        raise ValueError(
            f"--workload {args.workload} has fixed requests for {spec.model}; leave out --{extra}"
        )
    if spec.rows:
        options = {"max_num_seqs": spec.rows, **options}
    shape = args.shape or (None if args.model or spec.chats else spec.model)
    model = shape or args.model or spec.model or EMBEDDED
    config = EngineConfig.from_options(options)
    device = pick_device(config.device)
    directory = workloads.write_shape(shape, temporary) if shape else find_checkpoint(model)
    sizes = Checkpoint(directory).model_config
    dtype = pick_dtype(config.dtype, device, sizes.dtype)
    if spec.chats:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(directory)
        work = workloads.read_chats(args.workload, tokenizer)
    else:
        work = workloads.make_workload(args.workload, spec, sizes.vocab_size)
    longest = min(sizes.max_position_embeddings, config.max_model_len or 1 << 60)
    if max(work.lengths) > longest:
        raise ValueError(
            f"--workload {work.name} has a request of {max(work.lengths):,} tokens, but {model} "
            f"ends at {longest:,}; lower --input, --output, --prefix or --turns, or take a --shape"
        )
    in_fp8 = config.kv_cache_dtype != "auto"
    kv_size = 1 if in_fp8 else dtype.itemsize
    size = dtype.itemsize, config.max_num_seqs, kv_size, config.quantization
    cost = roofline.costs(work, sizes, *size)
    cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if cuda else available_host_memory()
    others = ["hf", "hf-batch", "hf-paged"] if model == EMBEDDED else []
    others = others if args.baseline is None else list(dict.fromkeys(args.baseline))
    # On a CPU all engines are loaded at the same time.
    weight_bytes = cost["weight_bytes"] * (1 if cuda else 1 + len(others))
    # The remaining tenth is for the KV cache and the activations.
    if weight_bytes > 0.9 * free:
        in_engines = " in all engines" if others and not cuda else ""
        raise ValueError(
            f"{model} takes {weight_bytes / 2**30:.1f} GiB{in_engines}; "
            f"{free / 2**30:.1f} GiB are free; use a smaller --shape (qwen3-0.6b)"
        )

    common = {"directory": str(directory), "device": str(device), "dtype": str(dtype)[6:]}
    ours = {"skip_tokenizer_init": True, **options, "device": str(device), "dtype": str(dtype)[6:]}
    if shape and not others:
        ours["load_format"] = "dummy"
    job = {**common, "engine": "nanovllm", "work": asdict(work), "options": ours}
    engines = [Engine("nanovllm", work, COMMAND, job)]
    for name in others:
        if name == "vllm":
            given: Result = {"model": str(directory), "dtype": str(dtype)[6:]}
            given["max_num_seqs"] = config.max_num_seqs
            version = baselines.vllm_version(args.peer_python)
            peer = [args.peer_python, str(vllm_peer.__file__)]
            variables: dict[str, str] = {}
            if device.type == "cpu":
                variables, preloaded = baselines.vllm_libraries(args.peer_python)
                version += f"; {preloaded}"
            peer_job = baselines.vllm_job(given, work)
            engines.append(Engine(name, work, peer, peer_job, version, variables))
        elif name == "llama.cpp":
            size = min(args.batch_size, len(work.rounds[0]))
            path = gguf_weights.gguf_path(directory) if shape else None
            command, peer_job, note = baselines.llama_cpp(
                model, work, size, args.peer_python, path, config.quantization
            )
            engines.append(Engine(name, work, command, peer_job, note))
        else:
            part, note = baselines.hf_part(name, work, args.sample, args.batch_size)
            job = {**common, "engine": name, "work": asdict(part), "batch_size": args.batch_size}
            engines.append(Engine(name, part, COMMAND, job, note))
    is_small = config.quantization in roofline.WEIGHT_SIZES
    about = {
        "machine": ", ".join(f"{key} {value}" for key, value in machine.describe(device).items()),
        "model": f"{model} in {str(dtype)[6:]}"
        f"{f', weights in {config.quantization}' * is_small}{', KV in fp8' * in_fp8}",
        "workload": f"{work.name}: {spec.help}; {len(work.prompts)} requests; "
        f"{sum(work.lengths):,} tokens, {sum(work.outputs):,} of them output",
    }
    if experts := getattr(sizes, "experts", None):
        hits = roofline.expected_hits(work, experts, config.max_num_seqs)
        about["experts"] = (
            f"{experts}, and a decode step is expected to use {hits:.1f} if all are equally likely"
        )
    return Setup(work, directory, engines, device, dtype, cost, about, bool(shape and others))
