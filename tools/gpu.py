"""The measurements and tests for a machine with a GPU that is lent for fifteen minutes.

  python -m tools.gpu --seconds 580                    the commands of STEPS, in their order
  python -m tools.gpu --seconds 165 --only start long  some of them, by name
  python -m tools.gpu --small                          at sizes for a CPU, to try them

Each command has a limit in seconds, after which it is killed. With --seconds, no command begins
whose limit does not fit into the seconds that remain. What they print appears at once, and is added
to OUT/gpu.txt, so that nothing is lost if the run is cut. How each command has ended is printed
last, also after Ctrl-C. With --small the limits are ten times as long, and the tests for a GPU are
skipped, or run on the model of one:

  PYTHONPATH=tests/helpers:.ci PYTEST_ADDOPTS="-p dry_run_plugin" python -m tools.gpu --small
"""

import argparse
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

ROOT = Path(__file__).parents[1]
# With the name of each test, so that a run that is cut says where.
TESTS = "-m", "pytest", "-vv", "--tb=short", "-m", "gpu"


class Step(NamedTuple):
    name: str
    limit: int  # seconds, with compilation
    decides: str
    arguments: tuple[str, ...]  # of Python


def bench(workload: str, *arguments: str) -> tuple[str, ...]:
    return ("bench.py", "--repeats", "1", "--workload", workload, *arguments)


def tests(part: str, *arguments: str) -> tuple[str, ...]:
    return (*TESTS, *arguments, f"tests/backends/gpu/test_gpu_{part}.py")


FP8, INT8, INT4, EAGER = (
    ("--set", option)
    for option in (
        "kv_cache_dtype=fp8",
        "quantization=int8",
        "quantization=int4",
        "enforce_eager=True",
    )
)
SMALLEST = ("--shape", "qwen3-0.6b")
LARGE = ("--shape", "qwen3-8b")
EXPERTS = ("--shape", "qwen3-30b-a3b")
HYBRID = ("--shape", "qwen3.5-0.8b")
CHECK = "-m", "nanovllm", "check", "--only", "bfloat16"
CARD = "-c", "from tools.gpu import card; card()"
STARTS = "-c", "from tools.gpu import starts; starts('qwen3-0.6b')"
ANSWERS = "-n", "0", "-k", "cuda_equals or most_answers"
# The most important first. The limits are for an empty cache of Triton. The figures are of an H100:
# measured on 2026-11-22, or estimated where there is a question mark.
STEPS = [
    Step("card", 10, "the card, its driver and its clocks", CARD),
    Step("example", 75, "a user's first start, in bfloat16", ("example.py",)),
    Step("kernels", 90, "every kernel, and races", tests("kernels", "-n", "14")),
    Step("nano", 70, "20,509 tokens/s, 77 % of the roofline", bench("nano")),
    Step("nano-fp8", 60, "24,858 tokens/s, 51 %", bench("nano", *FP8)),
    Step("latency", 45, "714 tokens/s; few rows: commit 5d72968", bench("latency", *SMALLEST)),
    Step("engines", 150, "graphs, host cache, experts", tests("engines", "-n", "0")),
    Step("next", 80, "products of few rows, tiles for fp8, cuDNN", ("-m", "tools.benchmarks.next")),
    Step("stream", 45, "graphs of steps with chunks", bench("stream")),
    Step("stream-eager", 45, "half as fast without graphs?", bench("stream", *EAGER)),
    Step("8b-int8", 50, "2.7 ms a token?", bench("latency", *LARGE, *INT8)),
    Step("8b-int4", 50, "1.6 ms?", bench("latency", *LARGE, *INT4)),
    Step("experts", 90, "200 tokens/s, or a kernel for routing?", bench("latency", *EXPERTS)),
    Step("start", 45, "seconds of a start, memory of its graphs", STARTS),
    Step("hybrid", 45, "linear attention", bench("latency", *HYBRID)),
    Step("long", 55, "a library for the attention of prompts?", bench("long")),
    Step("models", 60, "answers, and tokens of a CPU", tests("models", *ANSWERS)),
    Step("check", 160, "each kernel's share of the peak", CHECK),
]
# Added to the arguments of bench.py with --small, which are read after those above.
SMALL = "--shape cpu-small --num-seqs 2 --input 4 8 --output 3 3 --dtype float32"


def card() -> None:
    """Print the card and its state, and the versions of torch and Triton."""
    import torch

    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    with suppress(FileNotFoundError):  # on a CPU
        subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv"])
    print(f"torch {torch.__version__}")
    with suppress(ImportError):
        import triton

        print(f"Triton {triton.__version__}")


def starts(*shapes: str) -> None:
    """Print the seconds of a start with graphs and without, and the memory of the graphs."""
    import torch

    from nanovllm import LLM
    from tools.benchmarks.workloads import write_shape

    for shape in shapes:
        outside = []  # bytes outside torch's allocator
        for eager in (True, False):
            with tempfile.TemporaryDirectory() as directory:
                path = str(write_shape(shape, Path(directory)))
                start = time.perf_counter()
                llm = LLM(path, load_format="dummy", skip_tokenizer_init=True, enforce_eager=eager)
                seconds = time.perf_counter() - start
            text = f"{shape}, {'eager' if eager else 'with graphs'}: {seconds:.1f} s"
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                outside.append(total - free - torch.cuda.memory_reserved())
                text += f", {outside[-1] >> 20} MiB outside torch's allocator, {free >> 20} free"
            print(text, end="", flush=True)
            del llm


def run_step(step: Step, arguments: tuple[str, ...], log: Path) -> str:
    """Run a command and show what it prints. Returns how it ended."""
    start = time.monotonic()
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
    with log.open("ab") as output, log.open("rb") as shown:
        shown.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() < start + step.limit:
                show(shown)
                time.sleep(0.2)
            status = process.poll()
        finally:
            with suppress(ProcessLookupError):  # also the processes that it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            show(shown)
    seconds = time.monotonic() - start
    how = f"cut after {step.limit} s" if status is None else f"status {status}, {seconds:.0f} s"
    return f"{step.name:13} {how:18} {step.decides}"


def show(log: BinaryIO) -> None:
    sys.stdout.write(log.read().decode(errors="replace"))
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools.gpu", description=__doc__, formatter_class=raw)
    names = [step.name for step in STEPS]
    parser.add_argument("--seconds", type=float, default=math.inf, help="of all commands together")
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("gpu-runs"), help="(%(default)s)")
    parser.add_argument("--small", action="store_true", help="at sizes for a CPU")
    args = parser.parse_args(argv)
    steps = [step for step in STEPS if step.name in args.only]
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "gpu.txt"
    ends: list[str] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_steps(steps, args.small, log, ends, time.monotonic() + args.seconds)
    except KeyboardInterrupt:
        ends.append("interrupted")
    text = "\n" + "\n".join(ends) + "\n"
    with log.open("a") as output:
        output.write(text)
    print(text, end="", flush=True)
    return 0 if all(" status 0," in end or " left out " in end for end in ends) else 1


def run_steps(steps: list[Step], small: bool, log: Path, ends: list[str], end: float) -> None:
    """Run commands until the time `end`, and add to `ends` how each has ended."""
    for step in steps:
        arguments = step.arguments
        if small:
            arguments += tuple(SMALL.split()) if arguments[0] == "bench.py" else ()
            arguments = tuple(x.replace("('qwen3-0.6b", "('cpu-small") for x in arguments)
        step = step._replace(limit=step.limit * (10 if small else 1))
        if step.limit > (left := end - time.monotonic()):
            text = f"left out of {left:.0f} s"
            ends.append(f"{step.name:13} {text:18} {step.decides}")
            continue
        print(f"\n== {step.name}: {step.decides}\npython {shlex.join(arguments)}\n", flush=True)
        with log.open("a") as output:
            output.write(f"\n== python {shlex.join(arguments)}\n")
        ends.append(run_step(step, arguments, log))


if __name__ == "__main__":
    sys.exit(main())
