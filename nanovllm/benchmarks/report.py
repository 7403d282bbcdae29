"""Report: what one run of bench.py found, as a table, as JSON and as a picture.

Given: finished measurements. Owns: nothing; a Report is a value.
"""

import dataclasses
import json
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from nanovllm.benchmarks.measure import Run, Where
from nanovllm.benchmarks.noise import is_noisy
from nanovllm.benchmarks.roofline import Floor, Need, Rates


@dataclass(frozen=True)
class Timed:
    """One pass of one engine."""

    seconds: float
    noise: float | None  # share of the machine that other processes took meanwhile


@dataclass(frozen=True)
class Row:
    """One engine's repeats; the n-th of each row ran side by side in time."""

    name: str
    note: str
    input_tokens: int
    output_tokens: int
    repeats: list[Timed]

    def rates(self) -> list[float]:
        """Output tokens a second."""
        return [self.output_tokens / t.seconds for t in self.repeats]

    @property
    def noise(self) -> float | None:
        """Of the repeat that had most of it; None where it cannot be measured."""
        return max((t.noise for t in self.repeats if t.noise is not None), default=None)


@dataclass(frozen=True)
class Report:
    command: str
    machine: dict[str, Any]
    model: str
    dtype: str
    about: str  # the workload
    rows: list[Row]  # ours first
    failed: list[str]  # baselines that did not run
    run: Run  # of our repeats, the one of median time; of two in the middle the slower
    where: Where
    rates: Rates
    need: Need
    floor: Floor
    load_seconds: float
    peak_memory: int

    @property
    def reached(self) -> float:
        """Share of the floor's speed that the median run has."""
        return self.floor.total / self.run.seconds


def describe_machine(device: torch.device) -> dict[str, Any]:
    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    cpu = platform.processor() or platform.machine()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git_commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cpu": names[0] if names else cpu,
        "cpu_features": [f for f in ("avx512_bf16", "amx_bf16") if f in flags],
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "versions": {p: of(p) for p in ("nanovllm", "torch", "transformers", "triton")},
    }


def git_commit() -> str | None:
    """Of the source tree, with "-dirty" if it is not as committed; None outside one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def one_line(machine: dict[str, Any]) -> str:
    features = ", ".join(machine["cpu_features"]) or "no bf16 units"
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v)
    return (
        f"{machine['device']}; {machine['cpu']}, {machine['cores']} cores ({features}), "
        f"{machine['threads']} threads; Python {machine['python']}, {versions}; "
        f"commit {machine['commit']}; {machine['date']}"
    )


def quantiles(values: list[float]) -> dict[str, float]:
    """p50 and p99 of seconds, in milliseconds."""
    ordered = sorted(1000 * v for v in values) or [0.0]
    n = len(ordered)
    return {"p50": ordered[n // 2], "p99": ordered[min(n - 1, int(0.99 * n))]}


def ratios(ours: Row, theirs: Row) -> list[float]:
    """Of each repeat, ours over theirs."""
    return [a / b for a, b in zip(ours.rates(), theirs.rates(), strict=True)]


def summary(report: Report) -> dict[str, Any]:
    """What the table says, by name; of the rates the medians."""
    run, ours = report.run, report.rows[0]
    return {
        "output_tokens_per_second": median(ours.rates()),
        "total_tokens_per_second": median(ours.rates())
        * (ours.input_tokens + ours.output_tokens)
        / ours.output_tokens,
        "ratios": {r.name: median(ratios(ours, r)) for r in report.rows[1:]},
        "noisy": [r.name for r in report.rows if is_noisy(r.noise)],
        "time_to_first_token_ms": quantiles(run.first_token),
        "time_per_output_token_ms": quantiles(run.per_token),
        "steps": len(run.steps),
        "mean_batch": mean(s.sequences for s in run.steps),
        "prefix_hit_rate": run.prefix_hit_rate,
        "preemptions": run.preemptions,
        "peak_memory_bytes": report.peak_memory,
        "load_seconds": report.load_seconds,
        "floor_seconds": report.floor.total,
        "fraction_of_floor_reached": report.reached,
    }


def table(report: Report) -> str:
    s, need, rates, floor = summary(report), report.need, report.rates, report.floor
    first, rest = s["time_to_first_token_ms"], s["time_per_output_token_ms"]
    lines = [
        f"{'':50} {'output':>9} {'least to most':>17} {'in + out':>9} {'others':>8} {'':5} {'ours is':>8} {'least to most':>15}",
        f"{'':50} {'tok/s':>9} {'':17} {'tok/s':>9} {'took':>8} {'':5} {'times':>8}",
    ]
    for row in report.rows:
        label = f"{row.name} ({row.note})" if row.note else row.name
        found, total = row.rates(), (row.input_tokens + row.output_tokens) / row.output_tokens
        line = f"{label:50} {median(found):9,.1f} {min(found):8,.1f} {max(found):8,.1f} {median(found) * total:9,.0f}"
        others = "unknown" if row.noise is None else f"{row.noise:.1%}"
        line += f" {others:>8} {'noisy' if is_noisy(row.noise) else '':5}"
        if row is not report.rows[0]:
            times = ratios(report.rows[0], row)
            line += f" {median(times):8.2f} {min(times):7.2f} {max(times):7.2f}"
            if is_noisy(row.noise) or is_noisy(report.rows[0].noise):
                line += " noisy"
        lines.append(line.rstrip())
    parts = sorted(report.where.parts.items(), key=lambda p: -p[1])
    layers = ", layer by layer" if report.machine["device"] == "CPU" else ""
    shares = ", ".join(f"{name} {seconds / report.where.seconds:.0%}" for name, seconds in parts)
    begin, end = report.where.steps
    lines += [
        "",
        f"time to first token   p50 {first['p50']:,.1f} ms, p99 {first['p99']:,.1f} ms",
        f"time per output token p50 {rest['p50']:,.2f} ms, p99 {rest['p99']:,.2f} ms",
        f"steps {s['steps']:,}, mean batch {s['mean_batch']:.1f}, prefix hit rate "
        f"{s['prefix_hit_rate']:.1%}, preemptions {s['preemptions']}, peak memory "
        f"{report.peak_memory / 2**20:,.0f} MiB ({'process' if report.machine['device'] == 'CPU' else 'GPU'}), ready after {report.load_seconds:.1f} s",
        f"measured here         reads {rates.bandwidth / 1e9:,.1f} GB/s (from {rates.read_bytes / 2**20:,.0f} MiB), "
        f"products {rates.matmul / 1e12:,.2f} TFLOP/s",
        f"needed                prefill {need.prefill_flops / 1e12:,.2f} TFLOP over {need.prefill_tokens:,} tokens; "
        f"decode {need.decode_bytes / 1e9:,.1f} GB ({need.steps:,} steps of {need.weight_bytes / 1e6:,.1f} MB of "
        f"weights, {need.kv_bytes / 1e9:,.1f} GB of KV) and {need.decode_flops / 1e12:,.2f} TFLOP",
        f"floor                 {floor.total:,.2f} s ({floor.prefill:,.2f} prefill, {floor.decode:,.2f} decode); "
        f"took {report.run.seconds:,.2f} s: {report.reached:.0%} of the floor's speed",
        f"where it went         {shares} (steps {begin:,} to {end:,} of a run of its own{layers})",
    ]
    return "\n".join(lines)


def nano_line(report: Report) -> str:
    """nano-vllm's last line."""
    tokens, seconds = report.rows[0].output_tokens, report.run.seconds
    return f"Total: {tokens}tok, Time: {seconds:.2f}s, Throughput: {tokens / seconds:.2f}tok/s"


def save_json(report: Report, path: Path) -> None:
    whole = {"summary": summary(report), **dataclasses.asdict(report)}
    path.write_text(json.dumps(whole) + "\n")


def plot(report: Report, path: Path) -> None:
    """Throughput against the floor, and how many sequences each step had."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    figure.suptitle(
        f"{report.model}, {report.dtype}, {report.machine['device']}: {report.about}", fontsize=8
    )
    names = [r.name for r in report.rows]
    middle = [median(r.rates()) for r in report.rows]
    spread = [
        [m - min(r.rates()) for r, m in zip(report.rows, middle, strict=True)],
        [max(r.rates()) - m for r, m in zip(report.rows, middle, strict=True)],
    ]
    left.bar(names, middle, yerr=spread, capsize=4)
    limit = report.rows[0].output_tokens / report.floor.total
    left.axhline(limit, color="black", linestyle="--", label=f"floor's speed, {limit:,.0f} tok/s")
    left.set(ylabel="output tokens/s")
    left.legend()
    steps = report.run.steps
    right.step([s.at for s in steps], [s.sequences for s in steps], where="post")
    right.set(xlabel="seconds", ylabel="sequences in the step", ylim=(0, None))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
