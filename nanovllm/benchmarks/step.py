"""One decode step on a CPU against what it cannot do without: its products, and its KV.

Given: nothing; Qwen3-0.6B's shape on random weights, 16 sequences of 192 tokens. In turn, so that a slow
moment meets all three: a step of the engine; the model's linear layers and head alone, on 16 rows;
and what attention is at the least in torch, KV gathered block by block and two batched products.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.benchmarks.shapes import write_shape

SHAPE, SEQUENCES, CONTEXT, TURNS = "qwen3-0.6b", 16, 192, 20
ALLOWED = 1.1  # times the gather and the products


def main() -> None:
    with tempfile.TemporaryDirectory() as parent:
        directory = write_shape(SHAPE, Path(parent))
        llm = LLM(
            str(directory), device="cpu", load_format="dummy", skip_tokenizer_init=True,
            num_kvcache_blocks=SEQUENCES * (CONTEXT // 16 + 2), max_model_len=2 * CONTEXT,
        )  # fmt: skip
    runner = llm.engine.runner
    runner.attention.cache.normal_()  # type: ignore[attr-defined]  # pages that are new would be timed
    params = SamplingParams(temperature=0.6, max_tokens=2 * TURNS, ignore_eos=True)
    for i in range(SEQUENCES):
        prompt = [(i + 7 * j) % 1000 for j in range(CONTEXT - TURNS // 2)]
        llm.engine.add_request(prompt, params)
    llm.engine.step()

    inputs = [torch.randn(SEQUENCES, p.weight.shape[1]).to(runner.dtype) for p in products(llm)]
    hidden = torch.randn(SEQUENCES, runner.model_config.hidden_size).to(runner.dtype)
    pieces: dict[str, Callable[[], object]] = {
        "step": llm.engine.step,
        "linear": lambda: linear(llm, inputs, hidden),
        "attention": reference(llm),
    }
    times: dict[str, list[float]] = {name: [] for name in pieces}
    with torch.inference_mode():
        for _ in range(TURNS):
            for name, piece in pieces.items():
                start = time.perf_counter()
                piece()
                times[name].append(time.perf_counter() - start)
    print(
        f"\ndecode step of {SHAPE}, {SEQUENCES} x {CONTEXT} tokens, {str(runner.dtype)[6:]}, "
        f"{torch.get_num_threads()} threads; milliseconds, median of {TURNS} (least to most)"
    )
    names = {
        "step": "the engine's step",
        "linear": "its linear layers alone",
        "attention": "KV gathered, two products",
    }
    for name, label in names.items():
        ms = [1e3 * t for t in times[name]]
        print(f"{label:26} {median(ms):7.1f} ({min(ms):.1f} to {max(ms):.1f})")
    step, least, kv = (median(times[n]) for n in pieces)
    bound = least + ALLOWED * kv
    print(
        f"linear + {ALLOWED} x gather   {1e3 * bound:7.1f}: the step takes {step / bound:.2f} of it"
    )


def products(llm: LLM) -> list:
    model = llm.engine.runner.model
    return [product for layer in model.layers for product in layer.products()]


def linear(llm: LLM, inputs: list[Tensor], hidden: Tensor) -> None:
    for product, x in zip(products(llm), inputs, strict=True):
        product(x)
    llm.engine.runner.model.logits(hidden)


def reference(llm: LLM) -> Callable[[], None]:
    """Of all layers: K and V to memory that is kept, queries of a KV head times its keys, and back."""
    config = llm.engine.runner.model_config
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    cache: Tensor = llm.engine.runner.attention.cache  # type: ignore[attr-defined]
    blocks, size = cache.shape[2], cache.shape[4]
    table = 1 + torch.arange(SEQUENCES * CONTEXT // size).view(SEQUENCES, 1, -1)
    rows = (table * kv_heads + torch.arange(kv_heads)[:, None]).flatten()
    rows = torch.cat((rows, rows + blocks * kv_heads))
    kept = cache.new_empty(len(rows), size * dim)
    queries = torch.randn(SEQUENCES * kv_heads, heads // kv_heads, dim).to(cache.dtype)

    def run() -> None:
        for layer in cache:
            found = torch.index_select(layer.view(-1, size * dim), 0, rows, out=kept)
            keys, values = found.view(2, SEQUENCES * kv_heads, -1, dim)
            torch.bmm(torch.bmm(queries, keys.mT), values)

    return run
