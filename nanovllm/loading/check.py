"""Compares the kernels of a backend with plain torch, on small random inputs.

Each function makes the inputs of a kernel from the sizes that it gets, and yields Comparisons. Its
first argument is a pair: the backend with the kernels, and the same in plain torch. `checks` lists
what the engine of a model uses, which select_backend.py compares at the start.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nanovllm.models.attention import PlainAttention
from nanovllm.models.backend import Backend, num_experts
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.layers import Linear
from nanovllm.models.qwen3 import Qwen3
from nanovllm.plan import Chunk, NewRow, ResultKind, RowSampling, StepPlan
from nanovllm.runner.rows import sampling_batch

if TYPE_CHECKING:
    from nanovllm.backends.gpu.graphs import DecodeGraphs
    from nanovllm.runner.model_runner import ModelRunner

# The largest ||found - wanted|| / ||wanted|| of a row. Both are rounded to the dtype.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}
# Tokens of the contexts of a chunk, which has the last 40 of them, and of three decodes.
CONTEXTS, CHUNK = (300, 5, 17, 700), 40
ROWS = 1, 17, 65, 200  # of a product: one for each tile of a GPU, and the first two on a CPU

Backends: TypeAlias = tuple[Backend, Backend]  # with kernels, and in plain torch


class Comparison(NamedTuple):
    what: str
    found: Tensor  # [rows, ...] of the kernel
    wanted: Tensor  # the same of plain torch
    factor: float = 1.0  # multiplies the tolerance

    def error(self) -> float:
        """Return the largest relative error of a row. It is NaN or infinite if they do not fit."""
        if self.found.shape != self.wanted.shape:
            return float("inf")
        found, wanted = (x.reshape(len(x), -1).double() for x in (self.found, self.wanted))
        errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-6)
        return float(errors.max())

    def limit(self, dtype: torch.dtype) -> float:
        """Return the largest allowed error for a model in `dtype`. Integers must be equal."""
        return self.factor * TOLERANCE[dtype] if self.wanted.is_floating_point() else 0.0


Comparisons: TypeAlias = Iterator[Comparison]


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
        error, limit = comparison.error(), comparison.limit(dtype)
        if not error <= limit:  # also NaN
            raise ArithmeticError(
                f"the result for {comparison.what} has a relative error of {error:.2g}, and at "
                f"most {limit:.2g} is expected"
            )


def normal_numbers(backend: Backend) -> Callable[..., Tensor]:
    """Return a function that makes random tensors of a shape, the same ones in each process."""
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return x.to(device=backend.device, dtype=dtype or backend.dtype)

    return new


def add_rms_norm(backends: Backends, size: int, weight_dtype: torch.dtype) -> Comparisons:
    new = normal_numbers(backends[0])
    x, weight = new(3, size), new(size, dtype=weight_dtype)
    for residual in (None, new(3, size)):
        results = [
            backend.add_rms_norm(
                x.clone(), None if residual is None else residual.clone(), weight, 1e-6
            )
            for backend in backends
        ]
        for what, found, wanted in zip(("the norm", "the sum"), *results, strict=True):
            yield Comparison(what, found, wanted)


def silu_and_mul(backends: Backends, size: int) -> Comparisons:
    x = normal_numbers(backends[0])(3, 2 * size)
    found, wanted = (backend.silu_and_mul(x.clone()) for backend in backends)
    yield Comparison("3 rows", found, wanted)


def sample(backends: Backends, vocab_size: int) -> Comparisons:
    """Compare tokens of greedy rows, of rows without a filter, and of rows with each filter."""
    device, dtype = backends[0].device, backends[0].dtype
    # 8 pairs of tokens, of which one is at the end, have the same probabilities for each vocabulary
    # and dtype. Roundings therefore decide no token, as they could with random logits.
    logits = torch.full((48, vocab_size), -20.0, dtype=dtype, device=device)
    pair, second = torch.arange(8, device=device), torch.arange(2, device=device)[:, None]
    logits[:, (pair + 1) * vocab_size // 8 - 1 - second] = (pair / 2 + second).to(dtype)
    # Temperature, top_k, top_p and min_p of 6 rows, 8 times.
    columns = (0, 1, 2, 1.5, 1, 1), (0, 0, 0, 2, 0, 0), (1, 1, 1, 1, 0.6, 1), (0, 0, 0, 0, 0, 0.4)
    params = torch.tensor(columns, dtype=torch.float32, device=device).repeat(1, 8)
    seeds = torch.arange(48, device=device)
    batch = sampling_batch(params, 7 * seeds, seeds)
    found, wanted = (backend.sample(logits, batch) for backend in backends)
    yield Comparison("48 rows", found[:, None], wanted[:, None])


def filled(
    backends: Iterable[Backend], projections: dict[str, int], weight: Tensor
) -> list[Linear]:
    """Return a Linear of each backend with the weight [outputs, inputs]."""
    modules = [Linear(weight.shape[1], projections, backend) for backend in backends]
    for module in modules:
        module.weight.copy_(weight)
        module.backend.after_load(module)
    return modules


def linear(
    backends: Backends, name: str, outputs: int, inputs: int, has_bias: bool = False
) -> Comparisons:
    """Compare products with the weight [outputs, inputs] of a layer called `name`."""
    new = normal_numbers(backends[0])
    modules = filled(backends, {name: outputs}, new(outputs, inputs))
    if has_bias:
        bias = new(outputs)
        for module in modules:
            module.bias = bias
    for rows in ROWS[:2] if modules[0].backend.device.type == "cpu" else ROWS:
        x = new(rows, inputs)
        found, wanted = (module(x) for module in modules)
        yield Comparison(f"{rows} rows", found, wanted)


def expert_mlp(backends: Backends, num: int, size: int, hidden: int) -> Comparisons:
    """Compare `num` MLPs of `size` for few rows of an expert and for many; some have none."""
    from nanovllm.features.models.moe.experts import expert_mlp

    new = normal_numbers(backends[0])
    gate_up, down = expert_linears(backends, new, num, size, hidden)
    for tokens in (3, 16 * num):
        x, choices = new(tokens, hidden), torch.arange(2 * tokens) ** 2 % num
        weights, choices = new(tokens, 2), choices.view(tokens, 2).to(x.device)
        found, wanted = (
            (first.backend.expert_mlp(first, second) or expert_mlp)(
                x, weights, choices, first, second
            )
            for first, second in zip(gate_up, down, strict=True)
        )
        yield Comparison(f"{tokens} tokens", found, wanted, factor=2)


def expert_linears(
    backends: Iterable[Backend], new: Callable[..., Tensor], num: int, size: int, hidden: int
) -> list[list[Linear]]:
    """Return for each backend the two Linears of `num` experts, with weights made by `new`."""
    inner = {f"experts.{i}.{kind}_proj": size for i in range(num) for kind in ("gate", "up")}
    outer = {f"experts.{i}.down_proj": hidden for i in range(num)}
    shapes = (2 * size * num, hidden), (hidden * num, size)
    return [
        filled(backends, projections, new(*shape) / shape[1] ** 0.5)
        for projections, shape in zip((inner, outer), shapes, strict=True)
    ]


def delta_rule(backends: Backends, sizes: tuple[int, int, int, int]) -> Comparisons:
    """Compare linear attention of a chunk of 130 tokens, of one of 3 after others, and of decodes.

    sizes: (Hk, Hv, Dk, Dv) of features/models/hybrid/delta_rule.py.
    """
    from nanovllm.features.models.hybrid.delta_rule import Segments
    from nanovllm.features.models.hybrid.states import kernels_of

    layer, x, conv, rule = linear_attention(normal_numbers(backends[0]), sizes, 133, 4)
    rows, size, results = torch.tensor([3, 0, 1], device=x.device), sizes[1] * sizes[3], []
    for backend in backends:
        decode, chunk = kernels_of(backend)
        states, out = (conv.clone(), rule.clone()), x.new_zeros(133, size)
        chunk(layer, x, *states, Segments([2, 0], [0, 130], [130, 133], [True, False]), out)
        results.append((out, decode(layer, x[:3].contiguous(), *states, rows), *states))
    names = "chunks", "decodes", "the state of the convolution", "the state of the rule"
    for name, found, wanted in zip(names, *results, strict=True):
        yield Comparison(name, found, wanted, factor=4)


def linear_attention(
    new: Callable[..., Tensor], sizes: tuple[int, int, int, int], tokens: int, rows: int
) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Return a layer, its projections of `tokens`, and the states of `rows`, made by `new`."""
    (key_heads, heads, key_dim, value_dim), wide = sizes, partial(new, dtype=torch.float32)
    channels = 2 * key_heads * key_dim + heads * value_dim
    projections = {"qkv": channels, "z": heads * value_dim, "b": heads, "a": heads}
    layer = SimpleNamespace(
        **dict(sizes=sizes, eps=1e-6, in_proj=SimpleNamespace(projections=projections)),
        **dict(conv1d=wide(4, channels), a_log=wide(heads), dt_bias=wide(heads)),
        norm=wide(value_dim),
    )
    rule = wide(rows, heads, key_dim, value_dim) / key_dim**0.5
    return layer, new(tokens, sum(projections.values())), new(rows, 3, channels), rule


def attention_step(
    backends: Backends,
    heads: tuple[int, int, int],
    norm_dtype: torch.dtype | None,
    block_size: int,
    is_fp8: bool,
    *,
    empty: float,
    contexts: Sequence[int] = CONTEXTS,
    query_lens: Sequence[int] = (CHUNK, 1, 1, 1),
) -> Iterator[tuple[PlainAttention, Tensor, ForwardBatch]]:
    """Yield for each backend its attention, the result of `norm_rope_store` and the batch.

    Sequences with one new token decode, and are last. Slots of no token contain the number `empty`.
    heads: numbers of query heads and KV heads, and their size. norm_dtype:
    dtype of the weights of the norms of q and k, or None for no norms.
    """
    (num_heads, kv_heads, dim), (kernels, _) = heads, backends
    new, device = normal_numbers(kernels), kernels.device
    # The blocks of the sequences are in any order. Padding is the null block.
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0), device="cpu")
    blocks = (order + 1).split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True).int()
    offsets, queries = torch.arange(block_size, device="cpu"), np.array(query_lens)
    slots = [
        (own[:, None] * block_size + offsets).flatten()[:context]
        for own, context in zip(blocks, contexts, strict=True)
    ]
    written = torch.cat([own[-num:] for own, num in zip(slots, query_lens, strict=True)])
    new_slots = written.to(device)
    batch = ForwardBatch(
        input_ids=new_slots,  # attention does not read the ids and positions
        positions=new_slots,
        slot_mapping=new_slots,
        query_start_loc=torch.tensor([0, *queries.cumsum()], dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, device=device),
        block_tables=tables.to(device),
        query_lens=queries,
        host_lens=np.array(contexts),
        num_decodes=sum(num == 1 for num in query_lens),
    )
    earlier: Any = SimpleNamespace(slot_mapping=torch.cat(slots).to(device))
    kv = new(2, len(earlier.slot_mapping), kv_heads, dim)
    qkv = new(len(written), (num_heads + 2 * kv_heads) * dim)
    norms = None if norm_dtype is None else tuple(new(2, dim, dtype=norm_dtype))
    angle = new(len(written), 1, dim // 2, dtype=torch.float32)
    cos, sin = angle.cos().to(qkv.dtype), angle.sin().to(qkv.dtype)
    rope = torch.cat((cos, cos), dim=2), torch.cat((-sin, sin), dim=2)
    config: Any = SimpleNamespace(
        **dict(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=dim),
        **dict(kv_layers=[0], rms_norm_eps=1e-6),
    )
    sizes = config, len(order) + 1, block_size, kernels.dtype, device
    for backend in backends:
        attention = backend.attention_class(*sizes, [(0.5, 2.0)] if is_fp8 else None)
        attention.cache.copy_(torch.full((), empty))
        attention.store(0, kv[0], kv[1], earlier)
        step = replace(batch)
        attention.prepare(step)
        yield attention, attention.norm_rope_store(0, qkv.clone(), norms, rope, step), step


def norm_rope_store(backends: Backends, *sizes: Any) -> Comparisons:
    """Compare q and the cache, for the sizes of `attention_step`."""
    num_heads, _, dim = sizes[0]
    found, wanted = (
        (q[:, :num_heads].flatten(1), attention.cache.view(-1, dim))
        for attention, q, _ in attention_step(backends, *sizes, empty=0.0)
    )
    is_fp8 = sizes[-1]
    if not is_fp8:  # some kernels scale q then
        yield Comparison("q", found[0], wanted[0])
    # A number in fp8 may be rounded to its other neighbor, which differs by up to an eighth.
    factor = 0.1 / TOLERANCE[backends[0].dtype] if is_fp8 else 1
    yield Comparison("the cache", found[1], wanted[1], factor)


def attend(backends: Backends, *sizes: Any) -> Comparisons:
    """Compare attention, for the sizes of `attention_step`. No NaN of an empty slot may be read."""
    found, wanted = (
        attention.attend(0, q, batch)
        for attention, q, batch in attention_step(backends, *sizes, empty=float("nan"))
    )
    factor = 2 if sizes[-1] else 1
    yield Comparison("a chunk", found[:CHUNK], wanted[:CHUNK], factor)
    yield Comparison("decodes", found[CHUNK:], wanted[CHUNK:], factor)


def checks(
    backends: Backends, model: Qwen3, vocab_size: int, block_size: int, is_fp8: bool
) -> Iterator[tuple[str, Comparisons]]:
    """Yield (name, comparisons) of each kernel that the engine of a model uses, once for each size.

    The names are the functions of this file. `model` is on the meta device. The sizes are the
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

    add(add_rms_norm, config.hidden_size, dtype_of(model.norm))
    attentions: list[Any] = [layer.self_attn for layer in model.layers]
    for attn in attentions:
        if hasattr(attn, "norms"):
            norms = attn.norms
            heads = config.num_heads, config.num_kv_heads, config.head_dim
            sizes = heads, None if norms is None else dtype_of(norms[0]), block_size, is_fp8
            add(norm_rope_store, *sizes)
            add(attend, *sizes)
        else:
            add(delta_rule, attn.sizes)
    for module in model.linears():
        (outputs, inputs), names = module.weight.shape, [*module.projections]
        num, is_up = num_experts(names), names[-1].endswith("up_proj")
        if is_up:
            add(silu_and_mul, outputs // max(1, num) // 2)
        if num and is_up:
            size = outputs // num // 2
            add(expert_mlp, num, fit(size, 64) if is_cpu else size, fit(inputs, 64))
        if not num and (is_cpu or not isinstance(plain.make_weight(1, 1, names), Tensor)):
            name = "lm_head" if "lm_head" in names else "q_proj"
            add(linear, name, fit(outputs, 256), fit(inputs, 1024), module.bias is not None)
    add(sample, min(vocab_size, 4096) if is_cpu else vocab_size)
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
