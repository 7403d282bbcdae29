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
attention, where heads are divided, and one in the feed-forward network. The table of embeddings is
divided too, and has one. Megatron and vLLM use the same names, and write x W with W [in, out]. Here
weights are stored as in torch, [out, in], so a column-parallel weight is divided by rows, and a
row-parallel one by columns.
"""

import json
import logging
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import torch

from lessons.lesson import ask, make_llm, runner_of
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.features.parallel.ranks import Ranks
from nanovllm.loading.memory import num_weights
from nanovllm.models.layers import silu_and_mul
from nanovllm.models.qwen3 import Qwen3

OPTIONS = dict(attention_backend="sdpa", num_kv_cache_blocks=64)
STEPS = 12


def run_rank(size: int) -> list[Any]:
    """Return what this one of `size` ranks has, the all-reduces of a step, and its output."""
    original = Ranks.all_reduce
    with mock.patch.object(Ranks, "all_reduce", autospec=True, side_effect=original) as reduce:
        llm = make_llm(**OPTIONS, tensor_parallel_size=size)
        [output] = ask(llm, ["What is 12 + 30?\n"], max_tokens=STEPS, ignore_eos=True)
    config = runner_of(llm).model.config
    mib = f"{num_weights(Qwen3.on_meta(config)) * 4 / 2**20:.1f}"
    return [config.num_heads, config.num_kv_heads, mib, reduce.call_count // STEPS, output["text"]]


def start_ranks() -> list[list[Any]]:
    """Run this file in two processes -> what `run_rank` returned. Raises CalledProcessError."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "-m", __name__]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True)
    return [results for _, *results in sorted(map(json.loads, done.stdout.splitlines()))]


def run() -> None:
    QUESTIONS.show(1)
    mlp = runner_of(make_llm(**OPTIONS)).model.layers[0].mlp
    gate, up = mlp.gate_up_proj.weight.chunk(2)  # [F, E] each
    down = mlp.down_proj.weight  # [E, F]
    half = len(gate) // 2
    x = torch.randn(1, gate.shape[1], generator=torch.Generator().manual_seed(0))
    y = []
    for part in (slice(0, half), slice(half, None)):
        inner = silu_and_mul(x @ torch.cat((gate[part], up[part])).T)
        y.append(inner @ down[:, part].T)
    say(f"""By hand, in one process: the feed-forward network of the first layer has {2 * half}
        inner units. Rank 0 has the first {half} of them, and rank 1 the others. The first numbers
        of the results:""")
    results = {"y0": y[0], "y1": y[1], "y0 + y1": y[0] + y[1], "one device": mlp(x)}
    rows = [(name, *(f"{v:.4f}" for v in result[0, :4])) for name, result in results.items()]
    show_table(("result", *"1234"), rows)
    QUESTIONS.show(2)
    say("""Now two real ranks, which torchrun starts. Each makes LLM(..., tensor_parallel_size=2)
        and the same calls. Nothing sends them plans: both schedulers see the same requests and so
        plan the same steps. Before each step the ranks compare a hash of the plan.""")
    names = ("one device", "rank 0", "rank 1")
    head = ("process", "query heads", "KV heads", "MiB of weights", "all-reduces", "output")
    values = (run_rank(1), *start_ranks())
    show_table(head, [(name, *has) for name, has in zip(names, values, strict=True)])
    say(f"""The all-reduces are of one step. In a decode of one sequence each adds up only
        {x.shape[1]} numbers, but it waits for the slowest rank, so their number
        matters more than their size. At the end each rank has the logits of one half of the
        vocabulary. The ranks exchange these and sample the same tokens as one device. What is
        gained: each rank stores and reads one half of the weights and of the KV.""")
    show_source(
        link("features.parallel.shards.config_of_rank", "num_heads=heads // size"),
        link("features.parallel.shards.tensors_of_rank", "BY_COLUMNS"),
        link("models.layers.Linear.__call__", "self.reduce"),
    )


QUESTIONS = Questions("""
    The first of two weights is column-parallel, the second row-parallel. Why not both
    column-parallel?
    (a) The ranks would exchange the results of the first.
    (b) The parts of the second would have different sizes.
    (c) Each rank would store the whole of the second.
    Answer: a. A rank would need all outputs of the first weight for its part of the second. A
    row-parallel weight needs only the outputs that its rank has, and one sum at the end is enough.
    Hint: A row of the second weight is multiplied with which outputs of the first?

    The embedded model has 5 layers. How many all-reduces does one of its steps have?
    Answer: 11. Two in each layer, and one of the embeddings.
    Hint: How many has a layer, and what else is divided?
""")

IN_VLLM = """`ColumnParallelLinear` and `RowParallelLinear` in `model_executor/layers/linear.py`.
One scheduler plans for all ranks: an executor (`v1/executor/multiproc_executor.py`) sends each plan
to the workers, which it has started."""


if __name__ == "__main__":
    logging.getLogger("nanovllm").setLevel(logging.WARNING)
    # In one write, so that lines of several ranks do not mix.
    sys.stdout.write(json.dumps([int(os.environ["RANK"]), *run_rank(2)]) + "\n")
