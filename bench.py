"""Measures nanovllm's throughput, compared with other engines and with the roofline.

  python bench.py                      the embedded model, compared with transformers
  python bench.py --workload nano      nano-vllm's benchmark at the shape of Qwen3-0.6B
  python bench.py --shape qwen3-8b     random weights of a known shape, without a download
  python bench.py --model Qwen/Qwen3-0.6B --workload prefix --json run.json
  python bench.py --workload cpu-mixed --baseline hf-batch vllm --peer-python ~/vllm/bin/python
  python bench.py --busy               alone and next to a busy process, in turns
  python bench.py --host-only          scheduling and batch building, without a model
  python bench.py --host-only --workload many       1,000 and 1,000,000 requests in one call
  python bench.py --workload mixed --set scheduling_policy=sjf --set max_num_seqs=16
  python bench.py --memory             host memory over 10,000 requests

All engines get the same weights, token ids, output lengths and temperature, and none stops early.
They take turns (A B A B), each in a separate process. On a CPU all processes load their engine and
run the workload once before the first turn. On a GPU each turn starts a process and measures its
second run. Each figure is the median over the turns, followed by its range. Other processes affect
the result: a figure is noisy if they took more than 3 % of the CPU time.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.cli.options import option
from nanovllm.config import DTYPES, EMBEDDED
from nanovllm.utils.checks import unknown_name
from tools.benchmarks import report
from tools.benchmarks.baselines import BASELINES, vllm_version
from tools.benchmarks.machine import cpu_seconds, describe_load, other_load
from tools.benchmarks.workloads import SHAPES, WORKLOADS

MODES = ("host_only", "memory")


def count(text: str, low: int = 1) -> int:
    """Parse a number of the command line."""
    if not text.isdecimal() or not low <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number from {low} to 100000")
    return int(text)


def name_of(kind: str, known: Iterable[str], text: str) -> str:
    """Parse a name of the command line. An error suggests the most similar known name."""
    if text not in known:
        raise argparse.ArgumentTypeError(unknown_name(kind, text, known))
    return text


def make_parser() -> argparse.ArgumentParser:
    tables = {"workloads": {n: str(w) for n, w in WORKLOADS.items()}, "baselines": BASELINES}
    epilog = ""
    for title, table in tables.items():
        epilog += f"{title}:\n" + "".join(f"  {n:14} {text}\n" for n, text in table.items()) + "\n"
    # If the usage is suppressed, an error is one line.
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench.py", argparse.SUPPRESS, __doc__, epilog, (), raw)
    number: dict[str, Any] = {"type": count, "metavar": "N"}
    limits: dict[str, Any] = {"type": count, "nargs": 2, "metavar": ("MIN", "MAX")}

    add = parser.add_argument_group("model and requests").add_argument
    workload = partial(name_of, "workload", WORKLOADS)
    add("--workload", type=workload, default="short", metavar="NAME", help="see below (short)")
    add("--model", help=f"directory or hub id (default: the shape, or {EMBEDDED})")
    shape = partial(name_of, "shape", SHAPES)
    add("--shape", type=shape, metavar="NAME", help=f"one of: {', '.join(SHAPES)}")
    add("--dtype", choices=DTYPES, default="auto", help="dtype of all engines (auto)")
    pair: dict[str, Any] = {"type": option, "default": [], "metavar": "OPTION=VALUE"}
    add("--set", action="append", **pair, help="an option of LLM(), like max_num_seqs=16")
    add = parser.add_argument_group("numbers of the workload").add_argument
    add("--num-seqs", **number, dest="count", help="requests, or conversations in chat")
    add("--input", **limits, help="tokens of a prompt, drawn uniformly")
    add("--output", **limits, help="output tokens of a request, drawn uniformly")
    add("--prefix", type=partial(count, low=0), metavar="N", help="tokens that all prompts share")
    add("--turns", **number, help="turns of each conversation")
    add = parser.add_argument_group("comparison and output").add_argument
    engine = partial(name_of, "baseline", BASELINES)
    add("--baseline", nargs="*", type=engine, metavar="NAME", help="other engines, see below")
    add("--peer-python", metavar="PATH", help="a Python with vLLM or llama-cpp-python")
    add("--busy", action="store_true", help="repeat each turn while a process uses one core")
    add("--repeats", **number, default=3, help="turns of each engine (3)")
    add("--sample", **number, help="limit the requests of hf (4), hf-batch and hf-paged (all)")
    add("--batch-size", **number, default=64, help="requests at once in hf-batch and hf-paged (64)")
    add("--json", type=Path, metavar="FILE", help="all measurements, with machine and commit")
    add = parser.add_argument_group("other measurements, instead of the throughput").add_argument
    add("--host-only", action="store_true", help="host time of a decode step without a model")
    add("--memory", action="store_true", help="host memory over 10,000 requests")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for arguments that cannot work, before anything long runs."""
    if args.model and args.shape:
        raise ValueError(f"--model {args.model} and --shape {args.shape}: give one of them")
    for name in ("input", "output"):
        low, high = getattr(args, name) or (1, 1)
        if low > high:
            raise ValueError(f"--{name} {low} {high}: give MIN <= MAX")
    path = args.json
    if path and (path.is_dir() or not path.resolve().parent.is_dir()):
        raise ValueError(f"cannot write {path}; name a file in a directory that exists")
    modes_given = [name for name in MODES if getattr(args, name)]
    mode = modes_given[0].replace("_", "-") if modes_given else ""
    for name in ("json", "baseline"):
        if mode and getattr(args, name):
            raise ValueError(f"--{name} goes with the throughput only; leave out --{mode}")
    if "vllm" in (args.baseline or ()):
        vllm_version(args.peer_python)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    command = shlex.join(["bench.py", *(sys.argv[1:] if argv is None else argv)])
    try:
        check(args)
        from tools.benchmarks import modes, throughput  # not for --help: torch

        options = {"dtype": args.dtype, **dict(args.set)}
        if any(getattr(args, name) for name in MODES):
            start = cpu_seconds()
            for name in filter(partial(getattr, args), MODES):
                getattr(modes, name)(args, options)
            print(f"\nCPU time of other processes: {describe_load(other_load(start))}")
            return 0
        with tempfile.TemporaryDirectory(prefix="nanovllm-bench-") as temporary:
            result = throughput.throughput(args, options, command, Path(temporary))
        print(f"\n{report.table(result)}")
    except (RuntimeError, TypeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")
    if args.workload == "nano":
        # The last line that nano-vllm's benchmark prints.
        tokens = result["engines"][0]["output_tokens"]
        seconds = result["run"]["seconds"]
        rate = tokens / seconds
        print(f"Total: {tokens}tok, Time: {seconds:.2f}s, Throughput: {rate:.2f}tok/s")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
