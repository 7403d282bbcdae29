"""Which kernels the engine of a model uses, and whether they and its CUDA graphs are right.

comparisons.py compares a kernel with plain torch. select_backend.py runs `checks` at the start.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.loading import comparisons as compare
from nanovllm.loading.comparisons import CONTEXTS, Backends, Comparison, Comparisons
from nanovllm.models.backend import num_experts
from nanovllm.models.qwen3 import Qwen3
from nanovllm.plan import Chunk, NewRow, ResultKind, RowSampling, StepPlan

if TYPE_CHECKING:
    from nanovllm.backends.gpu.graphs import DecodeGraphs
    from nanovllm.runner.model_runner import ModelRunner


def system(device: torch.device) -> str:
    """Return the name of the processor, and the versions of the packages that compile kernels."""
    name = f"this {platform.machine()} processor"
    if device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        name = f"{torch.cuda.get_device_name(device)} (compute capability {capability})"
    modules = [sys.modules.get(package) for package in ("torch", "triton", "numba")]
    versions = [f"{module.__name__} {module.__version__}" for module in modules if module]
    return f"{name} with {', '.join(versions)}"


def check(comparisons: Comparisons, dtype: torch.dtype) -> None:
    """Run comparisons for a model in `dtype`. Raises ArithmeticError for the first that fails."""
    for comparison in comparisons:
        comparison.check(dtype)


def checks(
    backends: Backends, model: Qwen3, vocab_size: int, block_size: int, is_fp8: bool
) -> Iterator[tuple[str, Comparisons]]:
    """Yield (name, comparisons) of each kernel that the engine of a model uses, once for each size.

    The names are the functions of comparisons.py. `model` is on the meta device. The sizes are the
    model's where a kernel is compiled for them, and small elsewhere.
    """
    kernels, plain = backends
    config, is_cpu = model.config, kernels.device.type == "cpu"
    calls: dict[tuple[Callable[..., Comparisons], Any], None] = {}  # a set in order

    def add(function: Callable[..., Comparisons], *sizes: Any) -> None:
        calls[function, sizes] = None

    def dtype_of(norm: Tensor) -> torch.dtype:
        return norm.dtype if norm.dtype is torch.float32 else kernels.dtype

    def fit(size: int, most: int) -> int:
        """A size of at most about `most`. Kernels are compiled for what its last bits divide."""
        return size if size <= most else most + size % 32

    add(compare.add_rms_norm, config.hidden_size, dtype_of(model.norm))
    attentions: list[Any] = [layer.self_attn for layer in model.layers]
    for attn in attentions:
        if hasattr(attn, "norms"):
            norms = attn.norms
            heads = config.num_heads, config.num_kv_heads, config.head_dim
            sizes = heads, None if norms is None else dtype_of(norms[0]), block_size, is_fp8
            add(compare.norm_rope_store, *sizes)
            add(compare.attend, *sizes)
        else:
            add(compare.delta_rule, attn.sizes)
    for module in model.linears():
        (outputs, inputs), names = module.weight.shape, [*module.projections]
        num, is_up = num_experts(names), names[-1].endswith("up_proj")
        if is_up:
            add(compare.silu_and_mul, outputs // max(1, num) // 2)
        if num and is_up:
            size = outputs // num // 2
            add(compare.expert_mlp, num, fit(size, 64) if is_cpu else size, fit(inputs, 64))
        if not num and (is_cpu or not isinstance(plain.make_weight(1, 1, names), Tensor)):
            name = "lm_head" if "lm_head" in names else "q_proj"
            add(compare.linear, name, fit(outputs, 256), fit(inputs, 1024), module.bias is not None)
    add(compare.sample, min(vocab_size, 4096) if is_cpu else vocab_size)
    for function, sizes in calls:
        yield function.__name__, function(backends, *sizes)


def replay(runner: ModelRunner, graphs: DecodeGraphs, max_tokens: int) -> Comparisons:
    """Compare a replay of two rows with the eager step, at a context that attention splits.

    Prompts are computed before each of them, in steps of at most `max_tokens` tokens. The rows and
    the KV cache, which no request uses yet, are changed.
    """
    rows = [*range(min(2, runner.rows.num_rows, runner.num_blocks))]
    block_size, num_blocks = runner.rows.block_size, runner.num_blocks // len(rows)
    context = max(1, min(CONTEXTS[-1], runner.max_model_len, num_blocks * block_size) - 1)
    tables = [[1 + row + i * len(rows) for i in range(context // block_size + 1)] for row in rows]
    vocab_size = runner.model.config.vocab_size
    prompts = [[(7 * i * i + row) % vocab_size for i in range(context)] for row in rows]
    sampling, results = RowSampling(temperature=0.0, seed=0), []
    sent = torch.tensor([rows, rows], device=runner.device)  # rows and their order
    for decode in (partial(graphs.replay, rows), partial(runner.decode, *sent)):
        for row, table, prompt in zip(rows, tables, prompts, strict=True):
            new = [NewRow(row, table, sampling)]
            for start in range(0, context, max_tokens):
                part = prompt[start : start + max_tokens]
                runner.run(StepPlan(new, chunks=[Chunk(row, start, part, ResultKind.TOKEN)]))()
                new = []
        hidden, tokens = decode()
        results.append((hidden.clone(), tokens.clone()))
    # As before: the next step with these rows sends them again, and nothing has been computed.
    graphs.decode_rows = None
    runner.rows.positions[rows] = 0
    assert runner.device_rows is not None
    runner.device_rows.positions[sent[0]] = 0
    (found, tokens), (wanted, _) = results
    logits = runner.model.logits(found)  # of all ranks, before one of them can find a difference
    yield Comparison(f"{len(rows)} decodes in a CUDA graph", found, wanted, factor=3)
    chosen, best = logits.gather(1, tokens[:, None]), logits.amax(dim=1, keepdim=True)
    yield Comparison("the tokens of a CUDA graph", chosen, best, factor=3)
