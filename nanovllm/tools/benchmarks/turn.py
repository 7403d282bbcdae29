"""One turn of one engine, in a process of its own: load, run the workload once unmeasured, measure.

What ran before in a process affects a figure: memory that another engine keeps, threads that spin,
code that is compiled in the first run. `run_turn` therefore starts a process for each turn. Reads a
JSON object from stdin and writes one to the file that argv[1] names. For vLLM the process runs
vllm_peer.py, in an environment without nanovllm.

The engine has no hooks for measurements; only `run_engine` and `profile_run` use its internals.
"""

import cProfile
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams
from nanovllm.tools.benchmarks import baselines
from nanovllm.tools.benchmarks.workloads import Workload

Result = dict[str, Any]


# `-m` would not find a package that is neither installed nor in the working directory.
IMPORT = f"import sys; sys.path[:] = {sys.path!r}; from nanovllm.tools.benchmarks.turn import main; main()"
COMMAND = [sys.executable, "-c", IMPORT]


def run_turn(command: list[str], job: Result) -> Result:
    """Run a turn in a new process. Raises RuntimeError with what it printed last."""
    with tempfile.NamedTemporaryFile("r") as answer:
        given, command = json.dumps(job), [*command, answer.name]
        done = subprocess.run(command, input=given, capture_output=True, text=True)
        if done.returncode:
            tail = "\n".join(done.stderr.splitlines()[-12:])
            raise RuntimeError(f"it ended with status {done.returncode}:\n{tail}")
        return dict(json.load(answer))


def main() -> None:
    Path(sys.argv[1]).write_text(json.dumps(run(json.load(sys.stdin))))


def run(job: Result) -> Result:
    """Load one of the engines, and run its workload twice; return the second result."""
    work, dtype = Workload(**job["work"]), getattr(torch, job["dtype"])
    if job["engine"] == "nanovllm":
        return nanovllm_turn(job, work, dtype)
    model = baselines.load_hf_model(Path(job["directory"]), dtype, torch.device(job["device"]))
    return warm(lambda: baselines.run_hf(job["engine"], model, work, job["batch_size"]))


def warm(measured: Callable[[], Result]) -> Result:
    measured()
    return measured()


def nanovllm_turn(job: Result, work: Workload, dtype: torch.dtype) -> Result:
    if job["device"] == "cpu" and importlib.util.find_spec("numba"):
        # Otherwise the first run of a small model would use plain torch.
        importlib.import_module("nanovllm.backends.cpu.compile").compile_now(dtype)
    start = time.perf_counter()
    llm = LLM(job["directory"], **job["options"])
    load_seconds = time.perf_counter() - start
    answer = warm(lambda: run_engine(llm, work)) | {"load_seconds": load_seconds}
    if job["profile"]:
        answer["seconds_by_component"] = profile_run(llm, work)
    return answer


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
    with patch.object(runner, "fused_model", runner.model), kernels if cuda else calls:
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
