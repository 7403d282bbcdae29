"""Benchmarks of nanovllm.

    python bench.py                      throughput of the embedded model, with transformers beside it
                                         (under a minute on 2 cores)
    python bench.py --host-only          what a step costs the host, on a runner that computes nothing
    python bench.py --policy fcfs sjf    waiting time and time to first token under each policy

The figures depend on how busy the machine is: the CPU time that other processes took meanwhile is
printed with them, and marked where it passes 3 % of the machine.
"""

import argparse
import os
import random
import time
from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.benchmarks.host import HEAD_ROOMS, half_pool, host_cost
from nanovllm.benchmarks.policy import run_policy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-nano", help="directory, hub id (%(default)s)")
    parser.add_argument(
        "--dtype", default="auto", help="auto, float32, bfloat16 or float16 (%(default)s)"
    )
    parser.add_argument("--num-seqs", type=int, default=64, help="requests (%(default)s)")
    parser.add_argument(
        "--input",
        type=int,
        nargs=2,
        default=(16, 128),
        metavar=("MIN", "MAX"),
        help="prompt tokens, drawn uniformly (16 128)",
    )
    parser.add_argument(
        "--output",
        type=int,
        nargs=2,
        default=(16, 128),
        metavar=("MIN", "MAX"),
        help="output tokens of each request (16 128)",
    )
    parser.add_argument(
        "--host-only", action="store_true", help="no model: scheduling and batching"
    )
    parser.add_argument("--policy", nargs="+", choices=("fcfs", "sjf"), help="compare policies")
    args = parser.parse_args()
    if args.num_seqs < 1:
        parser.error(f"--num-seqs {args.num_seqs}: give 1 or more")
    for name in ("input", "output"):
        low, high = getattr(args, name)
        if not 1 <= low <= high:
            parser.error(f"--{name} {low} {high}: give 1 <= MIN <= MAX")
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{'CUDA ' + torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}"
    )
    with Neighbours():
        if args.host_only:
            host_only()
        elif args.policy:
            policies(args)
        else:
            try:
                throughput(args)
            except ValueError as error:
                parser.error(str(error))


class Neighbours:
    """Measures the CPU time that other processes take while its block runs, and prints it."""

    def __enter__(self) -> None:
        self.start = self._read()

    def __exit__(self, *_: object) -> None:
        (busy, total), own = self._read()
        (busy0, total0), own0 = self.start
        share = max(0.0, (busy - busy0) - (own - own0)) / max(1e-9, total - total0)
        print(f"other processes: {share:.1%} of the machine{', noisy' if share > 0.03 else ''}")

    def _read(self) -> tuple[tuple[float, float], float]:
        """((busy, all) CPU seconds of the machine, CPU seconds of this process)."""
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        tick = os.sysconf("SC_CLK_TCK")
        idle = fields[3] + fields[4]
        times = os.times()
        return ((sum(fields) - idle) / tick, sum(fields) / tick), times.user + times.system


def host_only() -> None:
    torch.set_num_threads(1)
    print("\ndecode step on the host, microseconds (sequences of 1,000 tokens, median of 200)")
    print(f"{'sequences':>9} {'schedule':>9} {'build':>9} {'commit':>9} {'sum':>9}")
    for n in (1, 64, 256, 1024):
        c = host_cost(n)
        total = c.schedule + c.build + c.commit
        print(f"{n:9} {c.schedule:9.1f} {c.build:9.1f} {c.commit:9.1f} {total:9.1f}")
    print("\n256 requests of 100 to 1,024 tokens in and out, on half the blocks they could use")
    print(f"{'head-room of admission':34} {'steps':>6} {'recomputed':>11} {'preemptions':>12}")
    for name in (None, *HEAD_ROOMS):
        run = half_pool(0, name)
        label = name or "one block a sequence (the engine's)"
        print(f"{label:34} {run.steps:6} {run.recomputed:11.1%} {run.preemptions:12}")


def policies(args: argparse.Namespace) -> None:
    def make_llm(policy: str) -> LLM:
        return LLM(
            args.model,
            dtype=args.dtype,
            scheduling_policy=policy,
            max_num_seqs=16,
            max_num_batched_tokens=256,
        )

    run_policy(make_llm, args.policy[0])  # warm-up
    print("\n6 prompts of 800 tokens, then 90 of 16 to 64; 16 sequences, budget 256; milliseconds")
    print(f"{'':6} {'':12} {'mean':>8} {'p50':>8} {'p99':>8} {'max':>8} {'output tok/s':>13}")
    for policy in args.policy:
        run = run_policy(make_llm, policy)
        for what, f in (("waiting", run.waiting), ("first token", run.first_token)):
            rate = f"{run.tokens_per_second:13,.0f}" if what == "waiting" else ""
            print(
                f"{policy:6} {what:12} {f.mean:8.0f} {f.p50:8.0f} {f.p99:8.0f} {f.maximum:8.0f} {rate}"
            )


def throughput(args: argparse.Namespace) -> None:
    """The engine, and transformers' generate one request at a time on a sample of the requests."""
    from transformers import AutoModelForCausalLM

    from nanovllm.checkpoint import find_checkpoint

    rng = random.Random(0)
    llm = LLM(args.model, dtype=args.dtype)
    size = llm.engine.model_config.vocab_size
    prompts = [
        [rng.randrange(size) for _ in range(rng.randint(*args.input))] for _ in range(args.num_seqs)
    ]
    lengths = [rng.randint(*args.output) for _ in prompts]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in lengths]
    llm.generate([1, 2, 3], SamplingParams(max_tokens=4), use_tqdm=False)  # warm-up

    runner = llm.engine.runner
    model: Any = AutoModelForCausalLM.from_pretrained(
        find_checkpoint(args.model), dtype=runner.dtype
    )
    model.to(runner.device)
    sample = list(range(0, args.num_seqs, max(1, args.num_seqs // 4)))[:4]
    ours, theirs = [], []
    for _ in range(3):  # A B A B A B
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        ours.append(sum(lengths) / (time.perf_counter() - start))
        start = time.perf_counter()
        for i in sample:
            ids = torch.tensor([prompts[i]], device=runner.device)
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=0.6,
                min_new_tokens=lengths[i],
                max_new_tokens=lengths[i],
            )
        theirs.append(sum(lengths[i] for i in sample) / (time.perf_counter() - start))
    print(
        f"\n{args.num_seqs} requests, {sum(map(len, prompts))} tokens in, {sum(lengths)} out, {runner.dtype}"
    )
    print(f"{'output tok/s':30} {'median':>9} {'min':>9} {'max':>9}")
    for name, rates in (
        ("nanovllm", ours),
        (f"transformers, {len(sample)} of them, one by one", theirs),
    ):
        print(f"{name:30} {sorted(rates)[1]:9,.0f} {min(rates):9,.0f} {max(rates):9,.0f}")
    print(f"ratio {sorted(a / b for a, b in zip(ours, theirs, strict=True))[1]:.1f}")


if __name__ == "__main__":
    main()
