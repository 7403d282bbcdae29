"""What the engine does with a workload: times, steps, and where they went.

Given: an LLM and a workload. Mutates: the engine, as any request does. The engine has no hooks for
this: it is watched from outside, and left as it was found.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams
from nanovllm.benchmarks.workloads import Workload
from nanovllm.engine.scheduler import Scheduler
from nanovllm.layers.linear import Linear
from nanovllm.plan import StepPlan


@dataclass(frozen=True)
class Step:
    at: float  # seconds after the start, when it was planned
    sequences: int
    tokens: int


@dataclass(frozen=True)
class Run:
    seconds: float
    first_token: list[float]  # seconds from arrival, of each request
    per_token: list[float]  # seconds for each token after the first; of requests that have one
    steps: list[Step]
    prefix_hit_rate: float
    preemptions: int


def params_of(workload: Workload, index: int) -> SamplingParams:
    return SamplingParams(
        temperature=workload.temperature,
        max_tokens=workload.outputs[index],
        ignore_eos=True,
        detokenize=False,
    )


def run_ours(llm: LLM, workload: Workload) -> Run:
    """All rounds through `generate`, from an empty prefix cache."""
    llm.reset_prefix_cache()
    scheduler = llm.engine.scheduler
    before = (scheduler.prompt_tokens, scheduler.cached_tokens, scheduler.preemptions)
    outs = []
    start = time.perf_counter()
    with watched(scheduler, start) as steps:
        for round_ in workload.rounds:
            params = [params_of(workload, i) for i in round_]
            outs += llm.generate([workload.prompts[i] for i in round_], params, use_tqdm=False)
        seconds = time.perf_counter() - start
    order = [i for round_ in workload.rounds for i in round_]
    first, rest = [], []
    for i, out in zip(order, outs, strict=True):
        n, times = len(out.outputs[0].token_ids), out.metrics
        if n != workload.outputs[i]:
            raise RuntimeError(f"request {i} got {n} tokens, not {workload.outputs[i]}")
        assert times.first_token_time is not None
        assert times.finished_time is not None
        first.append(times.first_token_time - times.arrival_time)
        if n > 1:
            rest.append((times.finished_time - times.first_token_time) / (n - 1))
    prompt, cached, preemptions = (
        now - then
        for now, then in zip(
            (scheduler.prompt_tokens, scheduler.cached_tokens, scheduler.preemptions),
            before,
            strict=True,
        )
    )
    return Run(seconds, first, rest, steps, cached / max(1, prompt), preemptions)


@contextmanager
def watched(scheduler: Scheduler, start: float) -> Iterator[list[Step]]:
    """The steps that the scheduler plans meanwhile, as they come."""
    steps: list[Step] = []
    schedule = scheduler.schedule

    def noting() -> StepPlan | None:
        plan = schedule()
        if plan is not None:
            sequences = len(plan.chunks) + len(plan.decode_rows)
            steps.append(Step(time.perf_counter() - start, sequences, plan.num_tokens))
        return plan

    with replaced(scheduler, "schedule", noting):
        yield steps


@contextmanager
def replaced(thing: object, name: str, by: object) -> Iterator[None]:
    """A method replaced, of one instance or of a class, and put back afterwards."""
    own = vars(thing).get(name)
    setattr(thing, name, by)
    try:
        yield
    finally:
        if own is None:
            delattr(thing, name)
        else:
            setattr(thing, name, own)


# ---- where the time went: a run of its own, for looking costs time ----


@dataclass(frozen=True)
class Where:
    steps: tuple[int, int]  # from, to
    seconds: float
    parts: dict[str, float]  # seconds of each; together they are all


def where(llm: LLM, workload: Workload, first: int, last: int) -> Where:
    """Run the workload once more, as far as step `last`, and account for the time from step `first`."""
    engine, cuda = llm.engine, llm.engine.runner.device.type == "cuda"
    llm.reset_prefix_cache()
    count, start = 0, 0.0
    parts: dict[str, float] = {}
    with ExitStack() as stack:
        for round_ in workload.rounds:
            for i in round_:
                engine.add_request(workload.prompts[i], params_of(workload, i))
            while engine.has_unfinished_requests() and count < last:
                if count == first:
                    parts = stack.enter_context(kernel_times() if cuda else call_times(llm))
                    start = time.perf_counter()
                engine.step()
                count += 1
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    llm.shutdown()
    rest = "waiting for the host" if cuda else "scheduling, building the batch"
    parts[rest] = seconds - sum(parts.values())
    return Where((first, count), seconds, parts)


@contextmanager
def call_times(llm: LLM) -> Iterator[dict[str, float]]:
    """On a CPU: exclusive seconds of the calls that make up a step; what runs in one runs in no other.

    Layer by layer also where a decode step is one call otherwise (models/compiled.py).
    """
    parts: dict[str, float] = {}
    running: list[str] = []
    since = 0.0

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal since
            now = time.perf_counter()
            if running:
                parts[running[-1]] += now - since
            running.append(part)
            since = now
            try:
                return call(*args, **options)
            finally:
                now = time.perf_counter()
                parts[running.pop()] += now - since
                since = now

        parts.setdefault(part, 0.0)
        return run

    runner = llm.engine.runner
    attention = [n for n in dir(runner.attention) if not n.startswith("_")]
    calls = [
        *(("attention", runner.attention, n) for n in attention),
        ("linear layers", Linear, "__call__"),
        ("linear layers", runner.model, "logits"),
        ("sampling", runner, "sample"),
        ("norms, activation", runner.model, "forward"),
    ]
    with ExitStack() as stack:
        stack.enter_context(replaced(runner, "layers", runner.model))
        for part, thing, name in calls:
            call = getattr(thing, name)
            if callable(call):
                stack.enter_context(replaced(thing, name, timed(part, call)))
        yield parts


# On a GPU: what a kernel's name tells of it; the first that matches counts.
KERNELS = {
    "attention": ("attention", "attend", "attn", "flash", "fmha", "paged", "sdpa", "_merge"),
    "linear layers": ("gemm", "gemv", "cutlass", "cublas", "nvjet", "xmma", "splitk", "linear"),
    "sampling": (
        "sampl",
        "argmax",
        "gumbel",
        "scan",
        "sort",
        "searchsorted",
        "topk",
        "draw",
        "_weigh",
        "threshold",
    ),
    "copies": ("memcpy", "memset", "copy_rows"),
}


@contextmanager
def kernel_times() -> Iterator[dict[str, float]]:
    """On a GPU: seconds of the kernels that ran, by torch's profiler; filled in at the end."""
    parts: dict[str, float] = {}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield parts
    for event in profiler.key_averages():
        if event.device_type.name == "CUDA":
            name = event.key.lower()
            part = next((p for p, marks in KERNELS.items() if any(m in name for m in marks)), None)
            part = part or "norms, activation and others"
            parts[part] = parts.get(part, 0.0) + event.self_device_time_total / 1e6
