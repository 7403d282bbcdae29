"""Lesson 4: the roofline of a step.

With a cache a step computes one token, and not 600. It is faster, but not 600 times. And a step of
16 requests takes less than twice as long as a step of one. Why? A step reads weights, keys and
values (bytes), and multiplies and adds numbers (FLOPs, floating-point operations). A processor can
do both at the same time, so a step takes at least as long as the slower of the two. This is its
roofline (Williams et al. 2009).

    FLOPs/s |          .-----------------   compute-bound: all that it computes
            |        .'
            |      .'    memory-bound: what its memory delivers
            |    .'
            +----+-----+-----------------   FLOPs for each byte that is read
              decode   ridge    prefill

A decode of R rows computes 2 FLOPs, a product and a sum, for each weight and row, and reads each
weight once. So more rows are nearly free up to some number, which this lesson calculates and
measures.
"""

from typing import Any

import torch

from lessons.lesson import decode_plan, prompt_plan, shape_of, timed
from lessons.pictures import show_plot
from lessons.show import Questions, faster, link, say, show_source, show_table
from nanovllm.backends.cpu.compile import compile_now
from nanovllm.config import EngineConfig
from nanovllm.loading import make_runner as start
from nanovllm.loading.select_backend import pick_dtype
from nanovllm.models.model_config import ModelConfig
from nanovllm.plan import StepPlan
from tools.benchmarks import roofline
from tools.benchmarks.workloads import Workload

LAYERS = 4  # layers and vocabulary of the part of Qwen3-0.6B that is timed
VOCAB = 16_384
ROWS = (1, 4, 16, 64)  # rows of the decodes that are timed
CONTEXT = 64  # tokens that a decode attends to
PROMPT = 256  # tokens of the prefill that is timed
BLOCK = 16


def decode_costs(
    config: ModelConfig, rows: int, context: int, weight_size: int = 2, kv_size: int = 2
) -> dict[str, int]:
    """Return the FLOPs and bytes of a decode. A weight and a KV value have these sizes in bytes."""
    prompts = [[row] * (context - 1) for row in range(rows)]
    work = Workload("", prompts, [2] * rows, [list(range(rows))])
    return roofline.costs(work, config, weight_size, rows, kv_size)


def step_seconds(config: ModelConfig) -> list[float]:
    """Return the times of decodes of ROWS rows, and of a prefill, with random weights."""
    options: Any = dict(dtype="auto", load_format="dummy", max_num_seqs=max(ROWS))
    options |= dict(num_kv_cache_blocks=max(ROWS) * CONTEXT // BLOCK)
    engine = EngineConfig(device="cpu", **options)
    runner = start.make_runner(engine, config, {}, "a random model", PROMPT)

    def fastest(plan: StepPlan, repeats: int) -> float:
        runner.run(plan)()  # prepares buffers
        return timed(lambda: runner.run(plan)(), repeats)[1]

    size = CONTEXT // BLOCK
    tables = [list(range(row * size + 1, row * size + size + 1)) for row in range(max(ROWS))]
    runner.run(prompt_plan([[1] * (CONTEXT - 10)] * max(ROWS), tables))()
    seconds = [fastest(decode_plan(rows), 9) for rows in ROWS]
    blocks = list(range(1, PROMPT // BLOCK + 1))
    return [*seconds, fastest(prompt_plan([[1] * PROMPT], [blocks]), 3)]


def show_steps(config: ModelConfig) -> float:
    """Print costs and times of steps. Returns the bytes per second that the machine reads."""
    cpu = torch.device("cpu")
    dtype = pick_dtype("auto", cpu, None)  # bfloat16, unless the processor only emulates it
    compile_now(dtype)  # otherwise plain torch would be timed
    prefill = roofline.costs(Workload("", [[0] * PROMPT], [1], [[0]]), config, dtype.itemsize, 1)
    peak = roofline.measure_peak(cpu, dtype, prefill["weight_bytes"])
    ridge = peak["flops"] / peak["bandwidth"]
    say(f"""A model of {LAYERS} of the 28 layers of Qwen3-0.6B with random weights and {VOCAB:,}
        tokens has {prefill["weight_bytes"] / 1e6:,.0f} MB of weights in {str(dtype)[6:]}. This
        machine reads them at {peak["bandwidth"] / 1e9:.1f} GB/s at most and computes
        {peak["flops"] / 1e9:,.0f} GFLOPs/s at most, measured now. The ridge is therefore at
        {ridge:.1f} FLOPs for each byte. In the table, least ms is the time at the
        roofline, and limit says what causes it. The measured share is least / measured. If a step
        is compute-bound, more rows take longer.

        A step that seems faster than its roofline means that the peak was measured a little too
        low.""")
    sizes = (CONTEXT, dtype.itemsize, dtype.itemsize)
    steps = [(f"decode of {n}", "decode", decode_costs(config, n, *sizes)) for n in ROWS]
    steps.append((f"prefill of {PROMPT}", "prefill", prefill))
    seconds = step_seconds(config)
    table, points = [], []  # points: FLOPs for each byte, GFLOPs/s
    for (step, phase, cost), measured in zip(steps, seconds, strict=True):
        least, bound = roofline.bounds(cost, peak)[phase]
        flops, read = cost[f"{phase}_flops"], cost[f"{phase}_bytes"]
        points.append((flops / read, flops / measured / 1e9))
        numbers = (f"{flops / 1e9:.2f}", f"{read / 1e6:.1f}", f"{flops / read:.1f}", bound)
        times = (f"{least * 1e3:.2f}", f"{measured * 1e3:.2f}", f"{least / measured:.0%}")
        table.append((step, *numbers, *times))
    head = ("GFLOPs", "MB", "FLOPs/byte", "limit", "least ms", "measured ms", "measured share")
    show_table(("step", *head), table)
    lowest, highest = min(points[0][0], ridge / 2), max(points[-1][0], 2 * ridge)
    roof = [(x, min(peak["bandwidth"] * x, peak["flops"]) / 1e9) for x in (lowest, ridge, highest)]
    lines = {"roofline": roof, ".measured steps": points}
    show_plot("The roofline of this machine", "FLOPs for each byte", "GFLOPs/s", lines, log=True)
    first, *_, last = seconds[:-1]
    say(f"""A decode of {ROWS[-1]} rows takes {last / first:.1f} times as long as a decode of
        {ROWS[0]}. Each token is {faster(first / ROWS[0], last / ROWS[-1])}.

        For the same reason a step with few rows can check several guessed tokens of each in little
        more time, which pays if texts repeat themselves (elective `drafts`).""")
    return peak["bandwidth"]


def run() -> None:
    QUESTIONS.show(1)
    bandwidth = show_steps(shape_of("qwen3-0.6b", num_layers=LAYERS, vocab_size=VOCAB))
    QUESTIONS.show(2)
    config = shape_of("qwen3-0.6b")
    cost, int8, fp8 = (decode_costs(config, 16, 4000, *sizes) for sizes in ((2, 2), (1, 2), (2, 1)))
    least = [f"{1e3 * c['decode_bytes'] / bandwidth:,.0f} ms" for c in (cost, int8, fp8)]
    say(f"""With all layers this decode reads {cost["weight_bytes"] / 1e6:,.0f} MB of weights and
        {cost["kv_bytes"] / 1e6:,.0f} MB of the cache, for which this machine takes {least[0]}.
        With int8 weights it takes {least[1]}, and with a cache in fp8 {least[2]}. Of 16 rows of 100
        tokens the cache has only {decode_costs(config, 16, 100)["kv_bytes"] / 1e6:,.0f} MB, so
        there int8 weights help more.""")
    show_source(
        link(roofline.costs, "linear = 2 *"),
        link(roofline.bounds),
        link("models.qwen3.Qwen3.logits"),
    )
    say("""What to do: look up the GFLOPs/s and GB/s of a GPU. From how many rows on is its decode
        limited by computing? Then calculate the KV of so many rows with 4,000 tokens each. It is
        the memory that lessons 5 to 9 are about.""")


QUESTIONS = Questions("""
    Suppose that a GPU computes 1,000 TFLOPs and reads 4 TB per second. A decode reads 2 bytes for
    each weight and computes 2 FLOPs for each weight and row; leave out attention. From how many
    rows on is it compute-bound?
    Answer: 250. R rows have R FLOPs for each byte, and the ridge is at 1,000 / 4 = 250. More rows
    make a step longer. With fewer rows the processor waits for memory.
    Hint: How many FLOPs for each byte does a decode of R rows compute? Where is the ridge?

    In bfloat16 Qwen3-0.6B has 1.2 GB of weights, and 115 kB of keys and values for each token. A
    GPU decodes 16 rows of 4,000 tokens. What makes this decode faster, weights or a KV cache of 8
    bits a number (int8 or fp8)? (a) The weights: all rows read them. (b) The cache: each row reads
    other keys and values, together more bytes than the weights. (c) Both equally: each halves the
    bytes of a number.
    Answer: b. 64,000 tokens of KV take 7.3 GB, and the weights 1.2 GB.
    Hint: The rows share one read of the weights. How many tokens' keys and values do they read?
""")
