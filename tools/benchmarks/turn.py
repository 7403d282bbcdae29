"""Runs an engine in a separate process, and one run of a workload in each turn.

Other work in a process affects measurements: memory that another engine keeps, threads that spin,
code that is compiled in the first run. `Process` therefore starts a process for each engine. The
process loads the engine, runs the workload once, and then once for each turn. It reads JSON from
stdin, a line for the job and a line for each turn, and writes a line for each to stdout. Everything
else that it prints goes to stderr. For vLLM the process runs vllm_peer.py, in an environment
without nanovllm.

The engine has no hooks for measurements; only `run_engine` and `profile_run` use its internals.
"""

import cProfile
import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.utils.child import python
from tools.benchmarks import baselines
from tools.benchmarks.machine import peak_memory
from tools.benchmarks.workloads import Workload

Result = dict[str, Any]


COMMAND = python("from tools.benchmarks.turn import main; main()")


class Process:
    """A loaded engine that has run its workload once. `loaded` has the times of the load and of the
    first run."""

    def __init__(
        self, command: list[str], job: Result, variables: Mapping[str, str] | None = None
    ) -> None:
        """`variables` are added to the environment."""
        # On Windows, a child process that still runs keeps the file `printed`.
        self.directory = tempfile.TemporaryDirectory(
            prefix="nanovllm-bench-", ignore_cleanup_errors=True
        )
        self.printed = Path(self.directory.name) / "printed"  # errors show the end of it
        with self.printed.open("w") as printed:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                env={**os.environ, **(variables or {})},
            )
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.loaded = self.ask(job)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as answers:
            for line in answers:
                self.answers.put(line)

    def turn(self, profile: bool = False) -> Result:
        """Run the workload."""
        return self.ask({"profile": profile})

    def ask(self, question: Result) -> Result:
        """Send a line and return the answer.

        Raises RuntimeError with the last lines that the process printed, if it has ended.
        """
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        # Waiting for the end of the pipe could take forever: child processes keep it open.
        while True:
            with suppress(queue.Empty):
                return dict(json.loads(self.answers.get(timeout=1)))
            if self.process.poll() is not None:
                break
        status = self.process.wait()
        tail = "\n".join(self.printed.read_text().splitlines()[-12:])
        raise RuntimeError(f"it ended with status {status}:\n{tail}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.directory.cleanup()


def main() -> None:
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # the output of libraries is not an answer
        loaded, measured = load(json.loads(sys.stdin.readline()))
        print(json.dumps(loaded), file=answers)
        for line in sys.stdin:
            print(json.dumps(measured(**json.loads(line))), file=answers)


def load(job: Result) -> tuple[Result, Callable[..., Result]]:
    """Load one of the engines and run its workload once.

    Returns the times of both, and a function that runs the workload again.
    """
    work = Workload(**job["work"])
    dtype = getattr(torch, job["dtype"])
    if job["engine"] == "nanovllm" and job["device"] == "cpu" and find_spec("numba"):
        # Otherwise the first run of a small model would use plain torch.
        importlib.import_module("nanovllm.backends.cpu.compile").compile_now(dtype)
    start = time.perf_counter()
    if job["engine"] == "nanovllm":
        llm = LLM(job["directory"], **job["options"])

        def measured(profile: bool) -> Result:
            llm.reset_prefix_cache()
            answer = run_engine(llm, work)
            return answer | ({"seconds_by_component": profile_run(llm, work)} if profile else {})
    else:
        model = baselines.load_hf_model(Path(job["directory"]), dtype, torch.device(job["device"]))

        def measured(profile: bool) -> Result:
            if job["engine"] == "hf-paged":
                return baselines.run_hf_paged(model, work, job["batch_size"])
            return baselines.run_hf(job["engine"], model, work, job["batch_size"])

    load_seconds = time.perf_counter() - start
    return {"load_seconds": load_seconds, "first_seconds": measured(False)["seconds"]}, measured


def run_engine(llm: LLM, work: Workload) -> Result:
    """Run all rounds through `generate`. The caller empties the prefix cache first."""
    fixed: Result = {"temperature": work.temperature, "ignore_eos": True, "detokenize": False}
    outs: list[Any] = []
    steps: list[Result] = []
    schedule = llm.engine.scheduler.schedule

    def record() -> Any:
        step = schedule()
        if step is not None:
            plan = step.plan
            seconds = time.perf_counter() - start
            sequences = len(plan.chunks) + len(plan.decode_rows)
            steps.append({"at": seconds, "sequences": sequences, "tokens": plan.num_tokens})
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
    cuda = torch.cuda.is_initialized()
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
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else peak_memory(),
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    return {f"p{q}": float(1000 * np.percentile(seconds or [0.0], q)) for q in (50, 99)}


def profile_run(llm: LLM, work: Workload) -> Result:
    """Return the seconds of each function (CPU) or kernel (GPU) in the first round.

    A request has at most 100 output tokens.

    The profiler makes the run slower. On a CPU the model runs layer by layer, even where a decode
    step is one compiled call otherwise.
    """
    runner: Any = llm.engine.runner
    cuda = torch.cuda.is_initialized()
    work = replace(work, outputs=[min(n, 100) for n in work.outputs], rounds=work.rounds[:1])
    llm.reset_prefix_cache()  # not measured, because it can take longer than a small run
    kernels = profile(activities=[ProfilerActivity.CUDA])
    # Without entries for built-in functions, their time counts for the functions that call them.
    calls = cProfile.Profile(builtins=False)
    with patch.object(runner, "fused_model", runner.model), kernels if cuda else calls:
        seconds = run_engine(llm, work)["seconds"]
    parts: dict[str, float] = defaultdict(float)
    for event in kernels.key_averages() if cuda else ():
        parts[event.key[:40]] += event.self_device_time_total / 1e6
    for call in () if cuda else calls.getstats():
        code: Any = call.code
        # The functions of other packages count for the function that calls them.
        if is_own(code):
            inner = (c.totaltime for c in call.calls or () if not is_own(c.code))
            name = f"{Path(code.co_filename).stem}.{code.co_name}"
            parts[name] += call.inlinetime + sum(inner)
    parts["GPU idle" if cuda else "other"] = max(0.0, seconds - sum(parts.values()))
    return parts


def is_own(code: Any) -> bool:
    """Return whether a code object is in this package, by its file and not by its module's name."""
    return Path(code.co_filename).is_relative_to(Path(nanovllm.__file__).parent)
