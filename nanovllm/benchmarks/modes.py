"""The smaller measurements that bench.py prints by themselves: host, policies, start-up, memory."""

import torch

from nanovllm import LLM
from nanovllm.benchmarks import process
from nanovllm.benchmarks.host import HEAD_ROOMS, half_pool, host_cost
from nanovllm.benchmarks.policy import run_policy


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


def policies(names: list[str], model: str, dtype: str) -> None:
    def make_llm(policy: str) -> LLM:
        return LLM(
            model,
            dtype=dtype,
            scheduling_policy=policy,
            max_num_seqs=16,
            max_num_batched_tokens=256,
        )

    run_policy(make_llm, names[0])  # warm-up
    print("\n6 prompts of 800 tokens, then 90 of 16 to 64; 16 sequences, budget 256; milliseconds")
    print(f"{'':6} {'':12} {'mean':>8} {'p50':>8} {'p99':>8} {'max':>8} {'output tok/s':>13}")
    for policy in names:
        run = run_policy(make_llm, policy)
        for what, f in (("waiting", run.waiting), ("first token", run.first_token)):
            rate = f"{run.tokens_per_second:13,.0f}" if what == "waiting" else ""
            print(
                f"{policy:6} {what:12} {f.mean:8.0f} {f.p50:8.0f} {f.p99:8.0f} {f.maximum:8.0f} {rate}"
            )


def startup() -> None:
    s = process.startup()
    print(
        "\nstart-up on the CPU, embedded model, median of 3 processes: importing torch and transformers' "
        f"config and tokenizer parts {s.others:.2f} s, nanovllm {s.ours:.3f} s more, LLM() {s.ready:.2f} s"
    )


def memory(dtype: str) -> None:
    print("\nhost memory while the embedded model serves requests on the CPU")
    for served, size in process.memory(dtype):
        print(f"{served:9,} requests {size / 2**20:9,.1f} MiB")
