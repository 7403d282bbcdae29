"""Benchmarks of nanovllm: how fast, against whom, and how near to what the machine can do.

    python bench.py                      the embedded model, with transformers beside it
    python bench.py --workload nano      nano-vllm's standard workload, at Qwen3-0.6B's shape
    python bench.py --shape qwen3-8b --workload latency
                                         a real architecture on random weights, nothing downloaded
    python bench.py --model Qwen/Qwen3-0.6B --workload prefix --json run.json --plot run.png
    python bench.py --workload cpu-mixed --baseline hf-batch vllm --peer-python ~/vllm/bin/python
    python bench.py --host-only          what a step costs the host, on a runner that computes nothing
    python bench.py --policy fcfs sjf    waiting time and time to first token under each policy
    python bench.py --startup --memory   what starting costs, and host memory over 10,000 requests
    python bench.py --step               a decode step against its products and its KV alone (CPU)
    python bench.py --kernels            the kernels, one by one (GPU)

All engines get the same weights, token ids, output lengths and temperature, and none stops early. They
run in turns (A B A B); a ratio is the median over the turns, with the least and the most beside it.
The figures depend on how busy the machine is: the CPU time that other processes took meanwhile is
measured, and a figure taken beside more than 3 % of the machine is marked noisy.
"""

import argparse
import ast
import importlib
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

from nanovllm.benchmarks import modes, report
from nanovllm.benchmarks.baselines import BASELINES, peer_version
from nanovllm.benchmarks.noise import Neighbours, verdict
from nanovllm.benchmarks.shapes import SHAPES
from nanovllm.benchmarks.throughput import throughput
from nanovllm.benchmarks.workloads import WORKLOADS
from nanovllm.checkpoint import EMBEDDED
from nanovllm.config import DTYPES


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage: --help has the room to explain."""
        self.exit(2, f"bench.py: {message}\n")


def make_parser() -> Parser:
    tables = {
        "workloads; their numbers can be set with the options above": {n: str(s) for n, s in WORKLOADS.items()},
        "baselines": BASELINES,
    }  # fmt: skip
    epilog = "\n\n".join(
        f"{title}:\n" + "\n".join(f"  {name:14} {text}" for name, text in table.items())
        for title, table in tables.items()
    )
    parser = Parser(
        description=__doc__,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python bench.py [options]",
    )
    # fmt: off
    what = parser.add_argument_group("what runs")
    what.add_argument("--workload", choices=WORKLOADS, default="short", metavar="NAME", help="see below (%(default)s)")
    which = what.add_mutually_exclusive_group()
    which.add_argument("--model", help=f"directory or hub id (the workload's shape, or {EMBEDDED})")
    which.add_argument("--shape", choices=SHAPES, metavar="NAME", help=f"random weights: {', '.join(SHAPES)}")
    what.add_argument("--dtype", choices=DTYPES, default="auto", help="of all engines (%(default)s)")
    what.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of LLM(), like max_num_seqs=16")
    numbers = parser.add_argument_group("numbers of the workload")
    numbers.add_argument("--num-seqs", type=int, metavar="N", help="requests; of chat, conversations")
    numbers.add_argument("--input", type=int, nargs=2, metavar=("MIN", "MAX"), help="prompt tokens, drawn uniformly")
    numbers.add_argument("--output", type=int, nargs=2, metavar=("MIN", "MAX"), help="output tokens, likewise")
    numbers.add_argument("--prefix", type=int, metavar="N", help="tokens that all prompts begin with")
    numbers.add_argument("--turns", type=int, metavar="N", help="of each conversation")
    beside = parser.add_argument_group("what runs beside it")
    beside.add_argument("--baseline", nargs="*", choices=BASELINES, metavar="NAME",
                        help="see below (hf and hf-batch beside the embedded model, else none)")
    beside.add_argument("--peer-python", metavar="PATH", help="an interpreter that has vLLM, for vllm and vllm-eager")
    beside.add_argument("--repeats", type=int, default=3, metavar="N", help="turns of each engine (%(default)s)")
    beside.add_argument("--sample", type=int, metavar="N", help="requests that hf (4) and hf-batch (all; in whole batches) run")
    beside.add_argument("--batch-size", type=int, default=64, metavar="N", help="of hf-batch (%(default)s)")
    kept = parser.add_argument_group("what is kept")
    kept.add_argument("--json", type=Path, metavar="FILE", help="everything, with machine, versions and commit")
    kept.add_argument("--plot", type=Path, metavar="FILE.png", help="throughput against the floor; batch size over time")
    other = parser.add_argument_group("other measurements, instead")
    other.add_argument("--host-only", action="store_true", help="no model: scheduling and batching")
    other.add_argument("--policy", nargs="+", choices=("fcfs", "sjf"), help="compare policies")
    other.add_argument("--startup", action="store_true", help="seconds until LLM() is ready")
    other.add_argument("--memory", action="store_true", help="host memory over 10,000 requests")
    other.add_argument("--kernels", action="store_true", help="on a GPU: the kernels, one by one")
    other.add_argument("--step", action="store_true", help="on a CPU: a decode step against its products and its KV alone")
    # fmt: on
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for what cannot work, before anything long is run."""
    for name in ("num_seqs", "turns", "repeats", "sample", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: give 1 or more")
        if (getattr(args, name) or 0) > 100_000:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(args, name)}: give 100000 at most"
            )
    if args.prefix is not None and args.prefix < 0:
        raise ValueError(f"--prefix {args.prefix}: give 0 or more")
    for name in ("input", "output"):
        low, high = getattr(args, name) or (1, 1)
        if not 1 <= low <= high:
            raise ValueError(f"--{name} {low} {high}: give 1 <= MIN <= MAX")
    for path in filter(None, (args.json, args.plot)):
        if path.is_dir() or not path.resolve().parent.is_dir():
            raise ValueError(f"{path} cannot be written; name a file in a directory that exists")
    if args.plot is not None and args.plot.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--plot {args.plot}: name a .png, .pdf or .svg file")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install -e '.[bench]'")
    if args.host_only or args.policy or args.startup or args.memory or args.kernels or args.step:
        for name in ("json", "plot", "baseline"):
            if getattr(args, name):
                raise ValueError(
                    f"--{name} goes with the throughput only, not with a measurement instead"
                )
    if any(name.startswith("vllm") for name in args.baseline or ()):
        if args.peer_python is None:
            raise ValueError(
                "--baseline vllm needs --peer-python, the python of an environment that has vLLM"
            )
        peer_version(args.peer_python)


def engine_options(settings: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: give OPTION=VALUE, like max_num_seqs=16")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value  # a word
    return options


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        check(args)
        options = engine_options(args.set)
        if args.kernels:
            return int(importlib.import_module("nanovllm.benchmarks.kernels").main() or 0)
        if args.host_only or args.policy or args.startup or args.memory or args.step:
            return instead(args)
        found = throughput(args, options, shlex.join(["bench.py", *argv]))
    except (TypeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        print("interrupted: nothing is kept of a run that did not end", file=sys.stderr)
        return 130
    print(f"\n{report.table(found)}")
    if args.json is not None:
        report.save_json(found, args.json)
    if args.plot is not None:
        report.plot(found, args.plot)
    if args.workload == "nano":
        print(report.nano_line(found))
    return 1 if found.failed else 0


def instead(args: argparse.Namespace) -> int:
    neighbours = Neighbours()
    if args.host_only:
        modes.host_only()
    if args.policy:
        modes.policies(args.policy, args.model or EMBEDDED, args.dtype)
    if args.startup:
        modes.startup()
    if args.memory:
        modes.memory(args.dtype)
    if args.step:
        importlib.import_module("nanovllm.benchmarks.step").main()
    print(f"other processes: {verdict(neighbours.share())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
