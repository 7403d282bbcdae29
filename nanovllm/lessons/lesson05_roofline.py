"""Lesson 5: the roofline of a step.

A step reads weights and keys and values (bytes), and multiplies and adds (FLOPs, floating-point
operations). A processor can do both at the same time, so that a step takes at least as long as the
slower of the two. This is its roofline (Williams et al. 2009).

    FLOPs/s |          .-----------------   compute-bound: all that it computes
            |        .'
            |      .'    memory-bound: what its memory delivers
            |    .'
            +----+-----+-----------------   FLOPs for each byte that is read
              decode   ridge    prefill

A decode of R rows computes 2 FLOPs for each weight and row, and reads each weight once. A prefill
computes many tokens for each read of the weights. This is why a batch of decodes is nearly free up
to some number of rows, which this lesson calculates and then measures.
"""

from typing import Any

import torch

from nanovllm.api.config import EMBEDDED, EngineConfig
from nanovllm.lessons.ladder import has_numba
from nanovllm.lessons.lesson import decode_plan, embedded_config, prompt_plan, shape_of, timed
from nanovllm.lessons.show import Question, faster, link, say, show_source, show_table
from nanovllm.loading import make_runner as start
from nanovllm.loading.checkpoint import find_checkpoint
from nanovllm.models.config import ModelConfig
from nanovllm.models.qwen3 import Qwen3
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.tools.benchmarks import roofline
from nanovllm.tools.benchmarks.workloads import Workload

LAYERS, VOCAB = 4, 16_384  # of the part of Qwen3-0.6B that is timed
ROWS = (1, 4, 16, 64)  # of the decodes that are timed
CONTEXT, PROMPT = 64, 256  # tokens that a decode attends to, and those of a prefill
BLOCK = 16


def decode_costs(
    config: ModelConfig, rows: int, context: int, weight_size: int = 2, kv_size: int = 2
) -> dict[str, int]:
    """FLOPs and bytes of a decode. The sizes are those of a number, in bytes."""
    prompts = [[row] * (context - 1) for row in range(rows)]
    work = Workload("", prompts, [2] * rows, [list(range(rows))])
    return roofline.costs(work, config, weight_size, rows, kv_size)


def random_runner(config: ModelConfig, quantization: str | None = None) -> ModelRunner:
    """A ModelRunner in bfloat16 with random weights, and blocks for all steps that are timed."""
    options: Any = dict(dtype="bfloat16", load_format="dummy", quantization=quantization)
    options |= dict(max_num_seqs=max(ROWS), num_kvcache_blocks=max(ROWS) * CONTEXT // BLOCK)
    engine = EngineConfig(device="cpu", **options)
    return start.make_runner(engine, config, find_checkpoint(EMBEDDED), PROMPT)


def time_decode(runner: ModelRunner, rows: int) -> float:
    """Return the seconds of a decode: the median of some, with contexts around CONTEXT."""
    size, step = CONTEXT // BLOCK, decode_plan(rows)
    tables = [list(range(row * size + 1, row * size + size + 1)) for row in range(rows)]
    runner.run(prompt_plan([[1] * (CONTEXT - 10)] * rows, tables))()
    runner.run(step)()  # prepares buffers
    return timed(lambda: runner.run(step)(), 9)[1]


def show_model(name: str, config: ModelConfig) -> tuple[dict[str, float], dict[int, float]]:
    """Print what steps cost and take -> what the machine can do, and rows -> seconds of a decode."""
    prefill = roofline.costs(Workload("", [[0] * PROMPT], [1], [[0]]), config, 2, 1)
    weights = prefill["weight_bytes"]
    peak = roofline.measure_peak(torch.device("cpu"), torch.bfloat16, weights)
    say(f"""{name}: {weights / 1e6:,.0f} MB of weights in bfloat16. This machine reads as many bytes at
        {peak["bandwidth"] / 1e9:.1f} GB/s at most and computes {peak["flops"] / 1e9:,.0f} GFLOPs/s at
        most, measured now. The ridge is therefore at {peak["flops"] / peak["bandwidth"]:.1f} FLOPs for
        each byte. Least is the roofline, and limit what it is due to: once that is compute, more rows
        take longer. Share is least / measured, above 100 % if other programs slowed the peaks.""")
    runner, table, seconds = random_runner(config), [], {}

    def add(step: str, cost: dict[str, int], phase: str, measured: float) -> None:
        (least, bound) = roofline.bounds(cost, peak)[phase]
        flops, read = cost[f"{phase}_flops"], cost[f"{phase}_bytes"]
        numbers = (f"{flops / 1e9:.2f}", f"{read / 1e6:.1f}", f"{flops / read:.1f}", bound)
        times = (f"{least * 1e3:.2f}", f"{measured * 1e3:.2f}", f"{least / measured:.0%}")
        table.append((step, *numbers, *times))

    for rows in ROWS:
        seconds[rows] = time_decode(runner, rows)
        add(f"decode of {rows}", decode_costs(config, rows, CONTEXT), "decode", seconds[rows])
    plan = prompt_plan([[1] * PROMPT], [list(range(1, PROMPT // BLOCK + 1))])
    add(f"prefill of {PROMPT}", prefill, "prefill", timed(lambda: runner.run(plan)())[1])
    head = ("GFLOPs", "MB", "FLOPs/byte", "limit", "least ms", "measured", "share")
    show_table(("step", *head), table)
    one, most = seconds[ROWS[0]], seconds[ROWS[-1]]
    say(f"""A decode of {ROWS[-1]} rows takes {most / one:.1f} times as long as one of {ROWS[0]}, so that
        each token is {faster(one / ROWS[0], most / ROWS[-1])}.""")
    return peak, seconds


def show_memory(config: ModelConfig, bandwidth: float) -> None:
    """Print what a decode of Qwen3-0.6B reads, by the dtypes of weights and cache."""
    table: list[tuple[str, ...]] = []
    for rows, context in ((1, 100), (16, 100), (16, 4000)):
        for weight, kv in ((2, 2), (1, 2), (2, 1), (1, 1)):
            cost = decode_costs(config, rows, context, weight, kv)
            names = ("int8" if weight == 1 else "bfloat16", "fp8" if kv == 1 else "bfloat16")
            numbers = (f"{cost['weight_bytes'] / 1e6:,.0f}", f"{cost['kv_bytes'] / 1e6:,.1f}")
            least = 1e3 * cost["decode_bytes"] / bandwidth
            name = f"{rows} x {context:,}"
            table.append((name, *names, *numbers, f"{least:,.0f}"))
    head = ("weights", "cache", "MB of weights", "MB of the cache", "least ms to read")
    show_table(("rows x context", *head), table)


def run() -> list[Question]:
    has_numba(torch.bfloat16)  # compiles them: the first start would run in plain torch
    whole = shape_of("qwen3-0.6b")
    part = shape_of("qwen3-0.6b", num_layers=LAYERS, vocab_size=VOCAB)
    show_model("The embedded model", embedded_config())
    name = f"{LAYERS} of the 28 layers of Qwen3-0.6B with random weights and {VOCAB:,} tokens"
    peak, seconds = show_model(name, part)
    int8 = time_decode(random_runner(part, "int8"), ROWS[0])
    say(f"""With int8 weights its decode of {ROWS[0]} takes {int8 * 1e3:.2f} ms and not
        {seconds[ROWS[0]] * 1e3:.2f}: it is {faster(seconds[ROWS[0]], int8)}.""")
    say("""What a decode of all of Qwen3-0.6B reads, calculated. All rows read the weights together, but
        each reads its own keys and values. Int8 weights therefore help short contexts, and a KV cache
        in fp8 (8 bits a number) helps many long ones:""")
    show_memory(whole, peak["bandwidth"])
    show_source(link(roofline.costs, "linear = 2 *"), link(roofline.bounds), link(Qwen3.logits))
    tokens = decode_costs(whole, 1, 1)["weight_bytes"] / whole.block_bytes(1, 2)
    return [
        Question(
            "Suppose that a GPU computes 1,000 TFLOPs and reads 4 TB per second. A decode reads 2 bytes "
            "for each weight and computes 2 FLOPs for each weight and row; leave out attention. From "
            "how many rows on is it compute-bound?",
            f"{1000 / 4:g}",
            "R rows have R FLOPs for each byte, and the ridge is at 1,000 / 4 = 250. More rows make a "
            "step longer; with fewer the processor waits for memory.",
            "How many FLOPs for each byte does a decode of R rows compute? Where is the ridge?",
        ),
        Question(
            "How many thousand tokens of context, of all rows together, take as much memory in "
            "bfloat16 as the weights of Qwen3-0.6B? Round to a whole number.",
            f"{tokens / 1000:.0f}",
            f"{tokens:,.0f} tokens. With more, a decode reads more keys and values than weights.",
            "Divide the MB of the weights by the MB of the cache in a row of the last table, both in "
            "bfloat16, and multiply by the tokens of that row.",
        ),
    ]
