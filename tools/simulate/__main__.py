"""Runs the real scheduler and block manager on a trace, with a clock in place of a model.

  python -m tools.simulate --make chat                          a made trace
  python -m tools.simulate conversation_trace.jsonl             Mooncake's format, or Azure's .csv
  python -m tools.simulate --make chat --shape qwen3-0.6b --device l4
  python -m tools.simulate --make chat --set max_num_batched_tokens=512 --policy mine.py
  python -m tools.simulate --measure qwen3-0.6b > table.json    steps of this machine
  python -m tools.simulate --make chat --table table.json --set num_kv_cache_blocks=400

A policy FILE is Python with at least one of these functions:
  policy_key(seq, block_manager)   a number; the waiting request with the smallest is the first
  choose_victim(block_manager)     the block of block_manager.evictable that is evicted next
  reserve(scheduler)               how many blocks admission leaves available
"""

import argparse
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanovllm.cli.options import option
from nanovllm.cli.trace.trace import Trace
from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.features.kv.host_cache.host_blocks import HostCacheBlockManager
from tools.benchmarks.workloads import SHAPES, WORKLOADS
from tools.simulate import traces
from tools.simulate.clock import DEVICES, Roofline, Table, measure
from tools.simulate.simulation import Simulation

OPTIONS = (
    "max_num_batched_tokens max_num_seqs num_kv_cache_blocks block_size scheduling_policy "
    "swap_space enable_prefix_caching async_scheduling"
)


def use_policy(path: str, scheduler: Scheduler) -> None:
    """Replace functions of the scheduler by those of a file. Raises ValueError."""
    blocks = scheduler.block_manager
    try:
        found = runpy.run_path(path)
    except Exception as error:
        raise ValueError(f"{path}: {error!r}") from error

    def call(name: str, *args: object) -> Any:
        try:
            value = found[name](*args)
        except Exception as error:
            raise ValueError(f"{path}: {name} raised {error!r}") from error
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{path}: {name} returned {value!r}, which is not a number")
        if name == "choose_victim" and value not in blocks.evictable:
            raise ValueError(f"{path}: choose_victim returned {value}, which is not evictable")
        return value

    places = {
        "policy_key": (scheduler, "policy_key", lambda seq, _: call("policy_key", seq, blocks)),
        "choose_victim": (blocks, "choose_victim", lambda: call("choose_victim", blocks)),
        "reserve": (scheduler, "reserve", lambda: call("reserve", scheduler)),
    }
    if not places.keys() & found.keys():
        raise ValueError(f"{path} defines none of {', '.join(places)}")
    for name, (owner, attribute, function) in places.items():
        if name in found:
            setattr(owner, attribute, function)


def make_scheduler(args: argparse.Namespace, clock: Any) -> tuple[Scheduler, bool]:
    """Return the scheduler of an engine with these options, and whether it plans ahead.

    Raises TypeError or ValueError.
    """
    values = {"block_size": traces.HASHED, "num_kv_cache_blocks": None, **dict(args.set)}
    for name in values.keys() - set(OPTIONS.split()):
        raise ValueError(f"{name} has no effect here; these have: {OPTIONS}")
    config = EngineConfig.from_options(values)
    size = config.block_size
    num_blocks = config.num_kv_cache_blocks
    if num_blocks is None:
        if isinstance(clock, Table):
            raise ValueError("a table says nothing of memory; give --set num_kv_cache_blocks=N")
        num_blocks = int(clock.cache_bytes / (size * clock.kv_bytes))
    if num_blocks < 1:
        raise ValueError(f"{args.shape} does not fit into {args.device}; name another device")
    if config.swap_space:
        block_bytes = size * Roofline(args.shape, args.device).kv_bytes
        num_host_blocks = int(config.swap_space * 2**30 / block_bytes)
        manager: BlockManager = HostCacheBlockManager(num_blocks, size, num_host_blocks)
    else:
        manager = BlockManager(num_blocks, size, config.enable_prefix_caching)
    limits = config.max_num_seqs, config.token_budget, config.scheduling_policy
    return Scheduler(manager, *limits), bool(config.async_scheduling)


def read_requests(args: argparse.Namespace, blocks: BlockManager) -> list[traces.TraceRequest]:
    if args.file is not None:
        requests = traces.read_trace(args.file)
    elif args.make in (None, "chat"):
        requests = traces.make_chat()
    else:
        from tools.benchmarks.workloads import make_workload  # its requests share nothing here

        work = make_workload(args.make, WORKLOADS[args.make], 10_000)
        sizes = zip(map(len, work.prompts), work.outputs, strict=True)
        requests = [traces.alone(0.0, *pair, i) for i, pair in enumerate(sizes)]
    for number, request in enumerate(requests):
        needed = -(-(request.num_prompt + request.num_output) // blocks.block_size)
        if needed > blocks.num_blocks:
            raise ValueError(
                f"request {number} needs {needed} blocks of {blocks.block_size} tokens, and the "
                f"pool has {blocks.num_blocks}; raise num_kv_cache_blocks"
            )
    return requests


def simulate(
    simulation: Simulation, requests: list[traces.TraceRequest], page: Path | None, steps: list[int]
) -> None:
    """Run all requests. A page shows the steps from the first to the last of `steps`."""
    trace = Trace(simulation)
    with tqdm(total=len(requests), desc="Simulating", unit="req", disable=None) as bar:
        for ended in simulation.run(requests):
            bar.update(ended - bar.n)
            if page is not None and simulation.steps >= steps[1]:
                break
            if page is not None and simulation.steps >= steps[0] and not trace.events:
                trace.__enter__()
    if page is not None:
        if not trace.num_steps:
            raise ValueError(f"--steps {steps[0]} {steps[1]}: none of {simulation.steps} steps")
        trace.save(page)


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    # If the usage is suppressed, an error is one line.
    usage = argparse.SUPPRESS
    parser = argparse.ArgumentParser("simulate", usage, __doc__, formatter_class=raw)
    add = parser.add_argument
    add("file", nargs="?", type=Path, metavar="TRACE", help="a .jsonl or .csv file")
    made = "without TRACE: chat, or a workload of bench.py, all of whose requests arrive at once"
    add("--make", choices=[*dict.fromkeys(("chat", *WORKLOADS))], metavar="NAME", help=made)
    add("--shape", choices=SHAPES, default="qwen3-8b", help="the model (qwen3-8b)")
    add("--device", choices=DEVICES, default="h100", help="the device of its roofline (h100)")
    add("--table", type=Path, metavar="FILE", help="steps that --measure has timed, instead")
    add("--measure", choices=SHAPES, metavar="SHAPE", help="time steps here, and print a table")
    pair: dict[str, Any] = {"type": option, "action": "append", "default": []}
    add("--set", **pair, metavar="OPTION=VALUE", help=f"an option of LLM(): {OPTIONS}")
    add("--policy", metavar="FILE", help="functions in place of the scheduler's, see above")
    together = "run N requests at a time, whenever they arrive"
    add("--concurrency", type=int, default=0, metavar="N", help=together)
    limits: dict[str, Any] = {"default": (1.0, 0.1), "metavar": ("FIRST", "BETWEEN")}
    goodput = "limits of goodput: seconds to the first token and between tokens (1 0.1)"
    add("--limits", type=float, nargs=2, **limits, help=goodput)
    add("--trace", type=Path, metavar="PAGE", help="write a page that shows the steps of --steps")
    steps: dict[str, Any] = {"default": (1, 200), "metavar": ("FIRST", "LAST")}
    add("--steps", type=int, nargs=2, **steps, help="with --trace: stop at the last (1 200)")
    add("--json", action="store_true", help="print the figures as JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return 0
    status = 0
    simulation = None
    try:
        if args.concurrency < 0:
            raise ValueError(f"--concurrency {args.concurrency}: give 0 or more requests")
        if args.file and args.make:
            raise ValueError(f"{args.file} and --make {args.make}: give one of them")
        if args.table:
            table = json.loads(args.table.read_text())
            if not {"seconds", "per_key"} <= {*table}:
                raise ValueError(f"{args.table} is no table; make one with --measure")
            clock: Any = Table([(n, s) for n, s in table["seconds"]], table["per_key"])
        else:
            clock = Roofline(args.shape, args.device)
        scheduler, is_async = make_scheduler(args, clock)
        if args.policy:
            use_policy(args.policy, scheduler)
        requests = read_requests(args, scheduler.block_manager)
        simulation = Simulation(scheduler, clock, args.limits, args.concurrency, is_async)
        simulate(simulation, requests, args.trace, args.steps)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted; the figures are of the steps before", file=sys.stderr)
        status = 130
        if simulation is None:
            return status
    if args.json:
        print(json.dumps(simulation.results()))
    else:
        for name, value in simulation.results().items():
            print(f"{name.replace('_', ' '):26} {value:,.{0 if value == int(value) else 4}f}")
    return status


if __name__ == "__main__":
    sys.exit(main())
