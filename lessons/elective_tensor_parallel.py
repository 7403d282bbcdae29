"""Elective tensor_parallel: a model divided among processes.

A model that is too large or too slow for one device is divided: each rank, a process with a device,
has a part of every layer and of the KV cache (Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053).
Two products follow each other in a layer, here with 8 numbers in between. The first weight is
column-parallel: a rank computes 4 of its 8 outputs. The second is row-parallel: a rank multiplies
these 4 outputs only, and has a part of each sum:

                 column-parallel    row-parallel
    rank 0   x -> outputs 0 to 3 --> inputs 0 to 3 --> y0 --.
                                                             >--> y0 + y1
    rank 1   x -> outputs 4 to 7 --> inputs 4 to 7 --> y1 --'     on both

Only the sum needs the other rank. It is called an all-reduce. A layer has two: one in the
attention, where heads are divided, and one in the feed-forward network. Megatron and vLLM use the
same names, and write x W with W [in, out]. Here weights are stored as in torch, [out, in], so a
column-parallel weight is divided by rows, and a row-parallel one by columns.
"""

import json
import logging
import os
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

from lessons.lesson import ask, embedded_config, make_llm, runner_of, timed
from lessons.pictures import show_lanes
from lessons.show import Questions, faster, link, say, show_source, show_table
from nanovllm.features.memory.tensor_parallel.ranks import Ranks
from nanovllm.loading.memory import num_weights
from nanovllm.models.layers import silu_and_mul
from nanovllm.models.qwen3 import Qwen3

PROMPTS = [f"What is 12 + {i}?\n" for i in range(4)]
OPTIONS = dict(attention_backend="sdpa", num_kv_cache_blocks=64)


def start_ranks(size: int) -> list[dict[str, Any]]:
    """Run this file once for each rank with torchrun -> what `run_rank` returned in each.

    Raises CalledProcessError if one fails.
    """
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    command = [*torchrun, f"--nproc-per-node={size}", "-m", __name__]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True)
    return [results for _, results in sorted(map(json.loads, done.stdout.splitlines()))]


def run_rank() -> dict[str, Any]:
    """Return this rank's part of the model, its output, and what a decode exchanges."""
    calls, all_reduce = list[int](), Ranks.all_reduce

    def counted(self: Ranks, x: Tensor) -> Tensor:
        calls.append(x.nbytes)
        return all_reduce(self, x)

    Ranks.all_reduce = counted  # type: ignore[method-assign]
    llm = make_llm(**OPTIONS, tensor_parallel_size=int(os.environ["WORLD_SIZE"]))
    outputs, seconds = timed(lambda: ask(llm, PROMPTS, max_tokens=16, ignore_eos=True))
    c, calls_of_step = runner_of(llm).model.config, len(calls) // (3 * 16)
    mib = f"{num_weights(Qwen3.on_meta(c)) * 4 / 2**20:.1f}"
    has = (c.num_heads, c.num_kv_heads, mib, calls_of_step, sum(calls[-calls_of_step:]))
    return {"has": has, "tokens": [o["token_ids"] for o in outputs], "ms": seconds * 1e3 / 16}


def show_by_hand() -> None:
    """Compute a feed-forward network in two parts, one after the other, and add these."""
    mlp = runner_of(make_llm(**OPTIONS)).model.layers[0].mlp
    gate, up = mlp.gate_up_proj.weight.chunk(2)  # [F, E] each
    down, half = mlp.down_proj.weight, len(gate) // 2  # [E, F]
    x = torch.randn(1, gate.shape[1], generator=torch.Generator().manual_seed(0))
    y = []
    for part in (slice(0, half), slice(half, None)):
        inner = silu_and_mul(x @ torch.cat((gate[part], up[part])).T)
        y.append(inner @ down[:, part].T)
    torch.testing.assert_close(y[0] + y[1], mlp(x))
    say(f"""By hand, in one process: the feed-forward network of the first layer has {2 * half}
        inner units. Rank 0 has the first {half} of them, and rank 1 the others. The first numbers
        of the results:""")
    results = {"y0": y[0], "y1": y[1], "y0 + y1": y[0] + y[1], "one device": mlp(x)}
    rows = [(name, *(f"{v:.4f}" for v in result[0, :4])) for name, result in results.items()]
    show_table(("result", *"1234"), rows)


def draw(both: list[dict[str, Any]]) -> None:
    """Draw one layer on both ranks, from left to right."""
    lanes, units = [], embedded_config().intermediate_size // len(both)
    for rank, part in enumerate(both):
        heads, kv_heads, *_ = part["has"]
        queries = f"query heads {rank * heads} to {rank * heads + heads - 1}"
        cells = [
            (0, 5, f"{queries}, KV head {rank * kv_heads}", rank + 1),
            (5, 1.6, "all-reduce", 3),
            (6.6, 3.4, f"inner units {rank * units} to {rank * units + units - 1}", rank + 1),
            (10, 1.6, "all-reduce", 3),
        ]
        lanes.append((f"rank {rank}", cells))
    show_lanes("A layer on two ranks", lanes)


def run() -> None:
    QUESTIONS.show(1)
    show_by_hand()
    say("""Now two real ranks, which torchrun starts. Each makes LLM(..., tensor_parallel_size=2)
        and the same calls. Nothing sends them plans: both schedulers see the same requests and so
        plan the same steps. Before each step the ranks compare a hash of the plan.""")
    [one], both = start_ranks(1), start_ranks(2)
    draw(both)
    names = ("one device", "rank 0 of 2", "rank 1 of 2")
    head = ("query heads", "KV heads", "MiB of weights", "all-reduces", "bytes of them")
    rows = [(name, *rank["has"]) for name, rank in zip(names, (one, *both), strict=True)]
    show_table(("process", *head), rows)
    assert both[0]["tokens"] == both[1]["tokens"] == one["tokens"]
    *_, calls, size = both[0]["has"]
    layers = embedded_config().num_layers
    say(f"""The last two columns are of a decode of {len(PROMPTS)} sequences. Each of the {layers}
        layers has two all-reduces, and the embeddings, whose rows are divided too, have one. One
        adds up {size // calls:,} bytes: {len(PROMPTS)} tokens of {embedded_config().hidden_size}
        numbers in float32. Each waits for the slowest rank, so their number matters more than their
        size. At the end each rank has the logits of one half of the vocabulary. The ranks exchange
        these and sample the same tokens as one device.""")
    say(f"""A step takes {one["ms"]:.1f} ms on one device and {both[0]["ms"]:.1f} ms on two: two
        ranks are {faster(one["ms"], both[0]["ms"])}. Here an all-reduce is a message between
        processes. On GPUs it takes microseconds, and each rank reads a half of the weights.""")
    show_source(
        link("features.memory.tensor_parallel.shards.config_of_rank", "num_heads=heads // size"),
        link("features.memory.tensor_parallel.shards.tensors_of_rank", "BY_COLUMNS"),
        link("models.layers.Linear.__call__", "self.reduce"),
    )


QUESTIONS = Questions("""
    The first of two weights is column-parallel, the second row-parallel. Why not both
    column-parallel? (a) A rank would need all outputs of the first weight for its part of the
    second, so the ranks would have to exchange them in between. (b) The parts would have different
    sizes. (c) Each rank would have to store the whole second weight.
    Answer: a. A row-parallel weight needs only the outputs that its rank has. One
    sum at the end is enough.
    Hint: A row of the second weight is multiplied with which outputs of the first?
""")


if __name__ == "__main__":
    logging.getLogger("nanovllm").setLevel(logging.WARNING)
    # In one write, so that lines of several ranks do not mix.
    sys.stdout.write(json.dumps([int(os.environ["RANK"]), run_rank()]) + "\n")
