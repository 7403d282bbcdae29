"""Lesson 5: the roofline of a step.

A step reads weights, keys and values (bytes), and multiplies and adds numbers (FLOPs,
floating-point operations). A processor can do both at the same time, so a step takes at least as
long as the slower of the two. This is its roofline (Williams et al. 2009).

    FLOPs/s |          .-----------------   compute-bound: all that it computes
            |        .'
            |      .'    memory-bound: what its memory delivers
            |    .'
            +----+-----+-----------------   FLOPs for each byte that is read
              decode   ridge    prefill

A decode of R rows computes 2 FLOPs for each weight and row, and reads each weight once. A prefill
computes many tokens for each read of the weights. A batch of decodes is therefore nearly free up to
some number of rows. This lesson calculates this number and then measures it.
"""

from typing import Any

import torch

from nanovllm.api.config import EMBEDDED, EngineConfig
from nanovllm.lessons.ladder import has_numba
from nanovllm.lessons.lesson import decode_plan, embedded_config, prompt_plan, shape_of, timed
from nanovllm.lessons.pictures import show_formula, show_plot
from nanovllm.lessons.show import Questions, faster, link, say, show_source, show_table
from nanovllm.loading import make_runner as start
from nanovllm.loading.checkpoint import Checkpoint, find_checkpoint
from nanovllm.loading.select_backend import pick_dtype
from nanovllm.models.config import ModelConfig
from nanovllm.models.qwen3 import Qwen3
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.single_rank import SingleRank
from nanovllm.tools.benchmarks import roofline
from nanovllm.tools.benchmarks.machine import cpu_seconds, other_load
from nanovllm.tools.benchmarks.workloads import Workload

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


def timed_dtype() -> torch.dtype:
    """Return bfloat16, or float32 on a processor that only emulates bfloat16, as `LLM` does."""
    return pick_dtype("auto", torch.device("cpu"), None)


def random_runner(config: ModelConfig, quantization: str | None = None) -> ModelRunner:
    """Make a ModelRunner with random weights, and blocks for all timed steps."""
    options: Any = dict(dtype="auto", load_format="dummy", quantization=quantization)
    options |= dict(max_num_seqs=max(ROWS), num_kvcache_blocks=max(ROWS) * CONTEXT // BLOCK)
    engine = EngineConfig(device="cpu", **options)
    checkpoint = Checkpoint(find_checkpoint(EMBEDDED), has_weights=False)
    return start.make_runner(engine, config, checkpoint, PROMPT, SingleRank())


def time_decode(runner: ModelRunner, rows: int) -> float:
    """Return the seconds of the fastest decode of 9, with contexts of about CONTEXT tokens.

    The peaks are the fastest of many runs too: other programs only make a run slower.
    """
    size, step = CONTEXT // BLOCK, decode_plan(rows)
    tables = [list(range(row * size + 1, row * size + size + 1)) for row in range(rows)]
    runner.run(prompt_plan([[1] * (CONTEXT - 10)] * rows, tables))()
    runner.run(step)()  # prepares buffers
    return min(timed(lambda: runner.run(step)(), 1)[1] for _ in range(9))


def show_model(name: str, config: ModelConfig) -> tuple[dict[str, float], dict[int, float]]:
    """Print costs and times of steps -> peak rates of the machine, rows -> seconds of a decode."""
    dtype = timed_dtype()
    prefill = roofline.costs(Workload("", [[0] * PROMPT], [1], [[0]]), config, dtype.itemsize, 1)
    weights, since = prefill["weight_bytes"], cpu_seconds()
    peak = roofline.measure_peak(torch.device("cpu"), dtype, weights)
    say(f"""{name}: {weights / 1e6:,.0f} MB of weights in {str(dtype)[6:]}. This machine reads them
        at {peak["bandwidth"] / 1e9:.1f} GB/s at most and computes {peak["flops"] / 1e9:,.0f}
        GFLOPs/s at most, measured now. The ridge is therefore at
        {peak["flops"] / peak["bandwidth"]:.1f} FLOPs for each byte. Least is the roofline, and
        limit is its cause. If a step is compute-bound, more rows take longer. Share is least /
        measured.""")
    runner = random_runner(config)
    table = []
    seconds, shares = {}, list[float]()
    points = []  # FLOPs for each byte, GFLOPs/s

    def add(step: str, cost: dict[str, int], phase: str, measured: float) -> None:
        shortest, bound = roofline.bounds(cost, peak)[phase]
        flops, read = cost[f"{phase}_flops"], cost[f"{phase}_bytes"]
        numbers = (f"{flops / 1e9:.2f}", f"{read / 1e6:.1f}", f"{flops / read:.1f}", bound)
        times = (f"{shortest * 1e3:.2f}", f"{measured * 1e3:.2f}", f"{shortest / measured:.0%}")
        table.append((step, *numbers, *times))
        shares.append(shortest / measured)
        points.append((flops / read, flops / measured / 1e9))

    for rows in ROWS:
        seconds[rows] = time_decode(runner, rows)
        cost = decode_costs(config, rows, CONTEXT, dtype.itemsize, dtype.itemsize)
        add(f"decode of {rows}", cost, "decode", seconds[rows])
    plan = prompt_plan([[1] * PROMPT], [list(range(1, PROMPT // BLOCK + 1))])
    add(
        f"prefill of {PROMPT}",
        prefill,
        "prefill",
        min(timed(lambda: runner.run(plan)(), 1)[1] for _ in range(3)),
    )
    head = ("GFLOPs", "MB", "FLOPs/byte", "limit", "least ms", "measured ms", "measured share")
    show_table(("step", *head), table)
    ridge = peak["flops"] / peak["bandwidth"]
    warn_if_busy(other_load(since), max(shares), ridge)
    lowest, highest = min(points[0][0], ridge / 2), max(points[-1][0], 2 * ridge)
    roof = [(x, min(peak["bandwidth"] * x, peak["flops"]) / 1e9) for x in (lowest, ridge, highest)]
    lines = {"roofline": roof, ".measured steps": points}
    show_plot(name, "FLOPs for each byte", "GFLOPs/s", lines, log=True)
    small, large = seconds[ROWS[0]], seconds[ROWS[-1]]
    say(f"""A decode of {ROWS[-1]} rows takes {large / small:.1f} times as long as a decode of
        {ROWS[0]}. Each token is {faster(small / ROWS[0], large / ROWS[-1])}.""")
    return peak, seconds


def warn_if_busy(load: float | None, share: float, ridge: float) -> None:
    """Say that the timings are wrong, if other programs had the processor or a result shows it.

    load: the part of the machine's time that other programs had, or None. share: the largest of a
        roofline. ridge: FLOPs for each byte; processors compute more than 1 while they read one.
    """
    if (load or 0) > 0.1 or share > 1.1 or ridge < 1:
        used = "" if load is None else f" Other programs used {load:.0%} of its processors."
        say(f"""THE MACHINE IS BUSY.{used} The peaks, the ridge, the limits and the shares above are
            wrong, and may teach the opposite of what is true. Run this lesson again when no other
            program runs.""")


def show_memory(config: ModelConfig, bandwidth: float) -> None:
    """Print the bytes that a decode of Qwen3-0.6B reads, by the dtypes of weights and cache."""
    table: list[tuple[str, ...]] = []
    for rows, context in ((1, 100), (16, 100), (16, 4000)):
        for weight, kv in ((2, 2), (1, 2), (2, 1), (1, 1)):
            cost = decode_costs(config, rows, context, weight, kv)
            names = ("int8" if weight == 1 else "bfloat16", "fp8" if kv == 1 else "bfloat16")
            numbers = (f"{cost['weight_bytes'] / 1e6:,.0f}", f"{cost['kv_bytes'] / 1e6:,.1f}")
            milliseconds = 1e3 * cost["decode_bytes"] / bandwidth
            name = f"{rows} x {context:,}"
            table.append((name, *names, *numbers, f"{milliseconds:,.0f}"))
    head = ("weights", "cache", "MB of weights", "MB of the cache", "least ms to read")
    show_table(("rows x context", *head), table)


def run() -> None:
    has_numba(timed_dtype())  # compiles the kernels; otherwise plain torch would be timed
    full = shape_of("qwen3-0.6b")
    part = shape_of("qwen3-0.6b", num_layers=LAYERS, vocab_size=VOCAB)
    show_formula(
        "seconds of a step >= max(FLOPs / FLOPs per second, bytes / bytes per second)",
        r"t \ge \max\left(\frac{\text{FLOPs}}{\text{FLOPs per second}}, "
        r"\frac{\text{bytes}}{\text{bytes per second}}\right)",
    )
    QUESTIONS.show(1, 2)
    show_model("The embedded model", embedded_config())
    name = f"{LAYERS} of the 28 layers of Qwen3-0.6B with random weights and {VOCAB:,} tokens"
    peak, seconds = show_model(name, part)
    int8 = time_decode(random_runner(part, "int8"), ROWS[0])
    say(f"""With int8 weights its decode of {ROWS[0]} takes {int8 * 1e3:.2f} ms and not
        {seconds[ROWS[0]] * 1e3:.2f}: it is {faster(seconds[ROWS[0]], int8)}.""")
    QUESTIONS.show(3)
    say("""The next table is calculated: the bytes that a decode of Qwen3-0.6B with all layers
        reads. All rows share one read of the weights, but each row reads different keys and values.
        Int8 weights therefore help short contexts, and a KV cache in fp8 (8 bits a number) helps
        many long contexts:""")
    show_memory(full, peak["bandwidth"])
    show_source(link(roofline.costs, "linear = 2 *"), link(roofline.bounds), link(Qwen3.logits))


QUESTIONS = Questions("""
    Suppose that a GPU computes 1,000 TFLOPs and reads 4 TB per second. A decode reads 2 bytes for
    each weight and computes 2 FLOPs for each weight and row; leave out attention. From how many
    rows on is it compute-bound?
    Answer: 250. R rows have R FLOPs for each byte, and the ridge is at 1,000 / 4 = 250. More rows
    make a step longer. With fewer rows the processor waits for memory.
    Hint: How many FLOPs for each byte does a decode of R rows compute? Where is the ridge?

    A decode of 1 row is far below the ridge. Why does a decode of 4 rows take little longer?
    (a) The four rows share one read of the weights, and the processor waits for this read.
    (b) The four rows are computed by four cores.
    (c) The weights are in the processor's cache after the first row.
    Answer: a. The FLOPs are four times as many, but they take less time than the read.
    Hint: What takes longer in a decode of 1 row: reading the weights, or computing with them?

    A GPU decodes 16 rows of 4,000 tokens each with Qwen3-0.6B. What makes this decode faster, int8
    weights or a KV cache in fp8?
    (a) Int8 weights: all rows read them.
    (b) The cache in fp8: each row reads other keys and values, so the cache is read more.
    (c) Both equally: each halves the bytes of a number.
    Answer: b. 64,000 tokens of KV take 7.3 GB, and the weights 1.2 GB.
    Hint: The rows share one read of the weights. Do they share the keys and values?
""")
