"""bench.py --gpu-report: what a GPU can tell about this engine, in parts with time limits.

The parts are in the order of what they decide, so that the first minutes on a card tell the most.
A part is one or more processes; one that fails or takes too long does not stop the others. What
they print is written at once: all of it to gpu-report.txt, and the rows (rows.py) to
gpu-report.jsonl. The end of both is a table of the parts and of their most important rows.
"""

import argparse
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Timer
from typing import Any

import torch

from nanovllm.utils.child import python
from tools.benchmarks.gpu.clocks import Clocks
from tools.benchmarks.gpu.rows import HEADLINE, Row, parse, text

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Run:
    """`rows` of a module of this folder with some options, in a separate process."""

    module: str
    options: dict[str, Any] = field(default_factory=dict)

    def command(self) -> list[str]:
        code = f"print_rows({self.module!r}, {self.options!r})"
        return python(f"from tools.benchmarks.gpu.rows import print_rows; {code}")

    def __str__(self) -> str:
        return " ".join([self.module, *(f"{k}={v}" for k, v in self.options.items())])


@dataclass(frozen=True)
class Part:
    title: str
    limit: int  # seconds for all runs together
    runs: Sequence[Run]


def engine(workload: str, **options: Any) -> Run:
    return Run("engine", {"workload": workload} | options)


# Tests of single kernels by their names, and the sets of them that part 1 runs at the same time.
KERNEL_TESTS = "attention or int8_linear or store or delta_rule or sampler or 2_31"
HALF = [
    *(
        f"test_attention and bfloat16 and {fp8}-{size}"
        for fp8 in (False, True)
        for size in (16, 256)
    ),
    "(int8_linear or store or sampler) and bfloat16",
    "(delta_rule and bfloat16) or 2_31",
]
INT8, FP8 = {"quantization": "int8"}, {"kv_cache_dtype": "fp8"}
LARGE = {"shape": "qwen3-8b"}
PARTS = (
    Part("the machine", 20, [Run("about")]),
    Part(
        "tests of single kernels in bfloat16",
        75,
        [Run("pytests", {"selections": HALF, "limit": 70})],
    ),
    Part("launches", 45, [Run("launches")]),
    Part("products", 50, [Run("products")]),
    Part("attention of a decode", 90, [Run("decode")]),
    Part(
        "steps",
        105,
        [
            Run("step", {"name": "bf16"}),
            Run("step", {"name": "fp8 KV", **FP8}),
            Run("step", {"name": "int8", **INT8}),
        ],
    ),
    Part(
        "workloads",
        155,
        [
            engine("nano"),
            engine("nano", **FP8),
            engine("latency"),
            engine("latency", **INT8),
            engine("latency", **FP8),
            engine("stream", max_num_seqs=64),
        ],
    ),
    Part(
        "the shape of Qwen3-8B",
        150,
        [
            engine("latency", **LARGE),
            engine("latency", **LARGE, **INT8),
            engine("nano", **LARGE, count=64, turns=1),
        ],
    ),
    Part(
        "the other tests",
        240,
        [
            Run("pytests", {"selections": [f"not ({KERNEL_TESTS})"], "limit": 150}),
            Run("pytests", {"selections": [f"({KERNEL_TESTS}) and not bfloat16"], "limit": 85}),
        ],
    ),
    Part(
        "other engines",
        300,
        [
            engine("latency", engine="hf-compiled", turns=1),
            engine("nano", engine="hf-batch", sample=64, turns=1),
            Run("peers"),
        ],
    ),
)


class Report:
    """The two files, and the lines of the table at the end."""

    def __init__(self, path: Path) -> None:
        self.text = path.open("w", encoding="utf-8")
        self.rows = path.with_suffix(".jsonl").open("w", encoding="utf-8")
        self.parts: list[str] = []
        self.headlines: list[str] = []
        self.clocks = Clocks()

    def write(self, line: str) -> None:
        print(line, flush=True)
        print(line, file=self.text, flush=True)

    def record(self, row: Row) -> None:
        print(json.dumps(row), file=self.rows, flush=True)

    def run_part(self, number: int, part: Part) -> None:
        """Run a part until its limit. Ctrl-C ends it too; the status is written first."""
        start = time.monotonic()
        self.write(f"\n== {number} {part.title}, at most {part.limit} s")
        failures: list[str] = []
        try:
            for run in part.runs:
                left = start + part.limit - time.monotonic()
                result = self.run(number, run, left) if left > 0 else "not started"
                failures += [f"{run}: {result}"] if result else []
        except KeyboardInterrupt:
            failures.append("interrupted")
            raise
        finally:
            row: Row = {"part": number, "title": part.title}
            row["status"] = "; ".join(failures) or "ok"
            row |= {"seconds": round(time.monotonic() - start, 1)} | self.clocks.since_last_call()
            self.record(row)
            self.parts.append(text({k: str(v) if k == "part" else v for k, v in row.items()}))
            self.write(f"-- {self.parts[-1]}")

    def run(self, number: int, run: Run, limit: float) -> str:
        """Write what a process prints. Returns "" or how it failed."""
        self.write(f"- {run}")
        # In a separate session, so that all that it started can be killed with it.
        process = subprocess.Popen(
            run.command(),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"},
            start_new_session=True,
        )
        expired = Event()

        def end(*events: Event) -> None:
            for event in events:
                event.set()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = Timer(limit, end, (expired,))
        timer.start()
        try:
            assert process.stdout is not None
            for printed in process.stdout:
                # Of a progress bar, which is one line, the last state.
                line = printed.decode(errors="replace").rstrip().rpartition("\r")[2]
                row = parse(line)
                if row is None:
                    self.write(line)
                    continue
                self.write(text(row))
                self.record({"part": number} | row)
                if row.get(HEADLINE):
                    self.headlines.append(f"{number}  {text(row)}")
        finally:
            timer.cancel()
            end()
            status = process.wait()
        if expired.is_set():
            return "reached the limit"
        return f"exit status {status}" if status else ""

    def close(self) -> None:
        """Write the table."""
        self.clocks.stop()
        for line in ("", "== table", *self.parts, "", *self.headlines):
            self.write(line)
        self.text.close()
        self.rows.close()


def gpu_report(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Run the parts that --only names, or all. Ctrl-C leaves what was finished."""
    numbers = args.only or range(len(PARTS))
    if (last := max(numbers)) >= len(PARTS):
        raise ValueError(f"--only {last}: give numbers from 0 to {len(PARTS) - 1}")
    if not torch.cuda.is_available():
        raise ValueError("--gpu-report needs a GPU, and torch finds none; leave it out")
    report = Report(args.gpu_report)
    try:
        for number in numbers:
            report.run_part(number, PARTS[number])
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        report.close()
    print(f"\nwritten to {args.gpu_report} and its .jsonl; please send them in an issue")
