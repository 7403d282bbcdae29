"""Lesson 4: the roofline of a step.

In lesson 3 the cache left 169 of 14,320 tokens to compute, but it saved much less of the time. And
a step of 4 requests takes much less than 4 times as long as a step of one, as the table below
shows. Why? A step reads weights, keys and values (bytes), and multiplies and adds numbers (FLOPs,
floating-point operations). A processor can do both at the same time, so a step takes at least as
long as the slower of the two. This is its roofline (Williams et al. 2009).

    FLOPs/s |          .-----------------   compute-bound: all that it computes
            |        .'
            |      .'    memory-bound: what its memory delivers
            |    .'
            +----+-----+-----------------   FLOPs for each byte that is read
              decode   ridge    prefill

A decode of R rows, one for each request, computes 2 FLOPs, a product and a sum, for each weight and
row, and reads each weight once. The ridge is the number of FLOPs for each byte at which both take
the same time. Below it, more rows are nearly free.
"""

import torch

from lessons.lesson import decode_plan, prompt_plan, shape_of, timed
from lessons.show import Questions, faster, link, say, show_source, show_table
from nanovllm.backends.cpu.compile import compile_now
from nanovllm.config import EngineConfig
from nanovllm.loading.make_runner import make_runner
from nanovllm.loading.select_backend import pick_dtype
from nanovllm.models.model_config import ModelConfig
from nanovllm.plan import StepPlan
from nanovllm.runner.one_rank import OneRank
from tools.benchmarks import roofline
from tools.benchmarks.workloads import Workload

SHOWS_TIMES = True
# The part of Qwen3-0.6B that is timed.
LAYERS = 4
VOCAB = 16_384
ROWS = (1, 4, 32, 64)  # rows of the decodes that are timed
CONTEXT = 64  # tokens that a decode attends to
PROMPT = 256  # tokens that the prefill computes


def decode_costs(config: ModelConfig, rows: int, context: int, itemsize: int = 2) -> dict[str, int]:
    """Return the FLOPs and bytes of a decode. A weight and a KV value have `itemsize` bytes."""
    prompts = [[row] * (context - 1) for row in range(rows)]
    work = Workload("", prompts, [2] * rows, [list(range(rows))])
    return roofline.costs(work, config, itemsize, rows)


def step_seconds(config: ModelConfig) -> list[float]:
    """Return the times of decodes of ROWS rows, and of a prefill, with random weights."""
    rows = max(ROWS)
    options = EngineConfig(
        device="cpu", load_format="dummy", max_num_seqs=rows, num_kv_cache_blocks=4 * rows
    )
    runner = make_runner(options, config, {}, "a random model", PROMPT, OneRank())
    tables = [[4 * row + i for i in (1, 2, 3, 4)] for row in range(rows)]  # blocks of 16 tokens
    runner.run(prompt_plan([[1] * (CONTEXT - 10)] * rows, tables))()

    def fastest(plan: StepPlan) -> float:
        return timed(lambda: runner.run(plan)(), 9)[1]

    prefill = prompt_plan([[1] * PROMPT], [list(range(1, 17))])
    return [*(fastest(decode_plan(n)) for n in ROWS), fastest(prefill)]


def run() -> None:
    QUESTIONS.show(1)
    cpu = torch.device("cpu")
    dtype = pick_dtype("auto", cpu, None)  # bfloat16, unless the processor only emulates it
    compile_now(dtype)  # otherwise plain torch would be timed
    config = shape_of("qwen3-0.6b", num_layers=LAYERS, vocab_size=VOCAB)
    prefill = roofline.costs(Workload("", [[0] * PROMPT], [1], [[0]]), config, dtype.itemsize, 1)
    peak = roofline.measure_peak(cpu, dtype, prefill["weight_bytes"])
    say(f"""The table times a part of Qwen3-0.6B: {LAYERS} of its 28 layers, and a vocabulary of
        {VOCAB:,}. These are {prefill["weight_bytes"] / 1e6:,.0f} MB of random weights in
        {str(dtype)[6:]}. This
        machine reads {peak["bandwidth"] / 1e9:.1f} GB/s and computes
        {peak["flops"] / 1e9:,.0f} GFLOPs/s at most, measured now: its ridge is at
        {peak["flops"] / peak["bandwidth"]:.1f} FLOPs for each byte. A row of a decode attends to
        {CONTEXT} tokens. Least ms is the time at the roofline:""")
    steps = [("decode", n, decode_costs(config, n, CONTEXT, dtype.itemsize)) for n in ROWS]
    steps.append(("prefill", PROMPT, prefill))
    table = []
    seconds = step_seconds(config)
    for (phase, number, cost), measured in zip(steps, seconds, strict=True):
        least, bound = roofline.bounds(cost, peak)[phase]
        flops, read = cost[f"{phase}_flops"], cost[f"{phase}_bytes"]
        costs = (f"{flops / 1e9:.2f}", f"{read / 1e6:.1f}", f"{flops / read:.1f}")
        times = (f"{least * 1e3:.2f}", f"{measured * 1e3:.2f}")
        table.append((f"{phase} of {number}", *costs, bound, *times))
    show_table(("step", "GFLOPs", "MB", "FLOPs/byte", "limit", "least ms", "measured ms"), table)
    first, *_, last, _ = seconds
    say(f"""A decode of {ROWS[-1]} rows takes {last / first:.1f} times as long as a decode of
        {ROWS[0]}. Each token is {faster(first / ROWS[0], last / ROWS[-1])}.""")
    say("""A real step takes longer than the least time: reads and products do not overlap all the
        time, and the norms and the sampling are not counted. A prefill computes the logits of its
        last token only, so it has fewer FLOPs than a decode of as many rows.

        So a token of a large batch costs less than a token that is computed alone. This also
        explains lesson 3. Without a cache a step computes the whole text, but it reads the weights
        once for all of its tokens. The cache saves the FLOPs of the earlier tokens, and no reads of
        weights. A step has fixed costs too, such as the calls of torch, which no cache saves.""")
    QUESTIONS.show(2)
    long, short = (decode_costs(shape_of("qwen3-0.6b"), 16, context) for context in (4000, 100))
    say(f"""This decode reads {long["weight_bytes"] / 1e6:,.0f} MB of weights and
        {long["kv_bytes"] / 1e6:,.0f} MB of the cache, for which this machine needs at least
        {1e3 * long["decode_bytes"] / peak["bandwidth"]:,.0f} ms. Of 16 rows of 100 tokens the cache
        has only {short["kv_bytes"] / 1e6:,.0f} MB: there smaller weights help more.""")
    show_source(
        link(roofline.costs, '"decode_flops"'),
        link(roofline.costs, '"decode_bytes"'),
        link(roofline.bounds),
    )
    rows = 989 / 3.35
    one = decode_costs(shape_of("qwen3-0.6b"), 1, 4000)
    say(f"""What to do: look up how many FLOPs (bfloat16, dense) a GPU computes in a second, and how
        many bytes it reads. From how many rows on is its decode compute-bound? How much memory does
        the KV of this many rows take, each with 4,000 tokens of Qwen3-0.6B? An example: an H100 has
        989 TFLOPs and 3.35 TB a second, so it is {rows:.0f} rows without attention. Their KV takes
        {rows * one["kv_bytes"] / 1e9:.0f} GB, more than its 80 GB, and no row shares its KV with
        another: a decode with long contexts is always memory-bound.""")


QUESTIONS = Questions("""
    Suppose that a GPU computes 1,000 TFLOPs and reads 4 TB per second. A decode reads 2 bytes for
    each weight and computes 2 FLOPs for each weight and row; leave out attention. From how many
    rows on is it compute-bound?
    Answer: 250. R rows have R FLOPs for each byte, and the ridge is at 1,000 / 4 = 250. More rows
    make a step longer. With fewer rows the processor waits for memory.
    Hint: How many FLOPs for each byte does a decode of R rows compute? Where is the ridge?

    In bfloat16 Qwen3-0.6B has 1.2 GB of weights, and 115 kB of keys and values for each token. A
    GPU decodes 16 rows of 4,000 tokens. Numbers of 8 bits (int8 or fp8) can store the weights, or
    the KV cache. Which of the two shortens this decode more?
    (a) The cache, of which each row reads its own part.
    (b) The weights, which each of the 16 rows has to read.
    (c) Neither: both would have half of their bytes.
    Answer: a. 64,000 tokens of KV take 7.3 GB. The weights take 1.2 GB, and one read of them serves
    all rows.
    Hint: The rows share one read of the weights. How many tokens' keys and values do they read?
""")

IN_VLLM = """no file calculates a roofline. What follows from it is in
`EngineArgs.get_batch_defaults` in `engine/arg_utils.py`: GPUs with more memory get a larger
max_num_batched_tokens and max_num_seqs."""
