"""Elective order: the same sum in two orders.

A float32 keeps 24 bits. Each addition rounds, and what is lost depends on what was added before:

    (16777216 + 1) + 1 = 16777216      each 1 is rounded away
    16777216 + (1 + 1) = 16777218

A kernel adds thousands of products in the order that is fastest: each lane of a vector register
adds a chain of them, and each program of a GPU a part, a split. Splits and tiles may be chosen by
the size of the batch, because many rows occupy a processor without splits. Then the bits of an
answer depend on the batch, on chunks and on shared prefixes, also at temperature 0 (He et al. 2025,
"Defeating Nondeterminism in LLM Inference"). With VLLM_BATCH_INVARIANT=1 vLLM has one order.
"""

import math
from typing import Any

import numpy as np

from lessons.lesson import ask, make_llm, optional
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.features.parallel.ranks import Ranks

NUMBERS = 4096
KEYS = 1024
SIZE = 64
SEGMENT = 64
PROGRAMS = 8
OTHERS = [f"What is {i} + {i + 9}?\n" for i in range(20)]
PROMPT = "".join(OTHERS) + "What is prefix sharing?\n"  # of several segments


def chain(numbers: Any) -> Any:
    """Add float32 numbers one after the other."""
    return np.add.accumulate(numbers)[-1]


def attend(queries: Any, keys: Any, values: Any, size: int) -> Any:
    """Return the attention of queries [R, D] over keys and values [N, D], by online softmax.

    It joins parts of `size` keys in order (lesson 10b). No sum in a part has an order that R sets.
    """
    largest = np.float32(-np.inf)
    total = np.float32(0)
    acc = np.zeros_like(queries)
    for start in range(0, len(keys), size):
        scores = (queries[:, None] * keys[start : start + size]).sum(-1)
        last, largest = largest, np.maximum(largest, scores.max(1, keepdims=True))
        weights, factor = np.exp(scores - largest), np.exp(last - largest)
        total = total * factor + weights.sum(1, keepdims=True)
        acc = acc * factor + (weights[:, :, None] * values[start : start + size]).sum(1)
    return acc / total


def run() -> None:
    QUESTIONS.show(1)
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((2, NUMBERS), "f").prod(axis=0)
    orders = {"1 chain": [numbers], "4 chains, in 4 lanes": numbers.reshape(-1, 4).T}
    orders |= {f"{n} splits": np.split(numbers, n) for n in (2, PROGRAMS)}
    say(f"""The {NUMBERS:,} products of a dot product, added in float32. The exact sum is
        {math.fsum(numbers):.6f}:""")
    show_table(("order", "sum"), [(n, f"{chain([*map(chain, p)]):.6f}") for n, p in orders.items()])
    say(f"""Attention is a sum too. Here {PROGRAMS} programs compute it for {KEYS:,} keys: one row
        gets {PROGRAMS} splits, and each of 4 rows gets 2. The first row is compared bit by bit with
        its result in a batch of 1. In the last column all rows have segments of {SEGMENT} keys:""")
    queries, keys, values = (rng.standard_normal((n, SIZE), "f") for n in (PROGRAMS, KEYS, KEYS))
    rows = []
    alone = list[Any]()
    for batch in (1, 2, 4, PROGRAMS):
        sizes = KEYS * batch // PROGRAMS, SEGMENT
        results = [attend(queries[:batch], keys, values, size)[0] for size in sizes]
        alone = alone or results
        equal = ["yes" if (a == b).all() else "no" for a, b in zip(alone, results, strict=True)]
        rows.append((batch, KEYS // sizes[0], *equal))
    show_table(("batch", "splits", "equal with splits", "equal with segments"), rows)
    say("""The kernels of this engine for a CPU have segments, wherever a chunk or a shared prefix
        ends. Are the log-probabilities of all tokens in an answer the same bits in any batch?""")
    llm = make_llm(attention_backend="numba", num_kv_cache_blocks=256)
    rows = []
    alone = []
    for name, others in {"alone": [], "in a batch of 21": OTHERS, "behind a prefix": []}.items():
        if others:
            llm.reset_prefix_cache()  # the last run has the prefix of this one
        output = ask(llm, [PROMPT, *others], max_tokens=20, logprobs=-1)[0]
        alone = alone or [output.outputs[0].logprobs]
        equal = ["yes" if output.outputs[0].logprobs == alone[0] else "no"]
        rows.append((name, output.num_cached_tokens, *equal))
    show_table(("request", "cached tokens", "equal"), rows)
    say("""What is left: another processor adds other chains, and each rank (`tensor_parallel`) adds
        a part before an all-reduce adds the parts. So compare bits on one machine, with one number
        of ranks and one version. The engine's kernels for a GPU still choose splits by batch.""")
    QUESTIONS.show(2)
    kernels = optional("nanovllm.backends.gpu.kernels.attention")  # None without Triton
    links = [link(kernels.num_splits, "num_seqs *")] if kernels else []
    show_source(link(Ranks.all_reduce, "dist.all_reduce"), *links)


QUESTIONS = Questions("""
    A float32 has 24 bits. What is (16777216 + 1) - 16777216, computed in float32?
    Answer: 0. 16777217 needs 25 bits. It is rounded to 16777216, the even one of its neighbors.
    Hint: Which number is 16777216 + 1 rounded to?

    At temperature 0, the logits of a request in a batch and alone differ by at most 0.000001. Where
    do the outputs differ?
    (a) Nowhere: the largest logit is the same.
    (b) From the first token on, in all of them.
    (c) From where the two largest are that close.
    Answer: c. Another token may be the largest there, and one other token is enough: all later
    tokens are computed from it.
    Hint: What does the sampler compare, and what does the next step compute from?
""")

IN_VLLM = """`VLLM_BATCH_INVARIANT` replaces operators of torch by the kernels of
`model_executor/determinism/batch_invariant.py`, such as `matmul_batch_invariant`, whose tiles do
not depend on the batch. Here the kernels of a CPU always have one order."""
