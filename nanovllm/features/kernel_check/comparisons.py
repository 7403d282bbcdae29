"""Comparisons of the kernels of a backend with plain torch, on small random inputs.

Each function makes the inputs of a kernel from the sizes that it gets, and yields Comparisons. Its
first argument is a pair: the backend with the kernels, and the same in plain torch. `checks` of
at_start.py lists what the engine of a model uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from nanovllm.models.attention import PlainAttention
from nanovllm.models.backend import Backend
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.layers import Linear
from nanovllm.plan import Chunk, NewRow, ResultKind, RowSampling, StepPlan
from nanovllm.runner.rows import Rows, sampling_batch

# The largest ||found - wanted|| / ||wanted|| of a row. Both are rounded to the dtype.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}
# Tokens of the contexts of a chunk, which has the last 40 of them, and of three decodes.
CONTEXTS = (300, 5, 17, 700)
CHUNK = 40
# Numbers of rows of products: one for each tile of a GPU. A CPU has the first two.
ROWS = 1, 17, 33, 65, 200

Backends: TypeAlias = tuple[Backend, Backend]  # with kernels, and in plain torch


class Comparison(NamedTuple):
    what: str
    found: Tensor  # [rows, ...] of the kernel
    wanted: Tensor  # the same of plain torch
    factor: float = 1.0  # multiplies the tolerance

    def check(self, dtype: torch.dtype) -> float:
        """Return the largest relative error of a row. Integers must be equal.

        Raises ArithmeticError if the error is too large for a model in `dtype`.
        """
        limit = self.factor * TOLERANCE[dtype] if self.wanted.is_floating_point() else 0.0
        error = float("inf")
        if self.found.shape == self.wanted.shape:
            found, wanted = (x.reshape(len(x), -1).double() for x in (self.found, self.wanted))
            errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-6)
            error = float(errors.max())
        if not error <= limit:  # also NaN
            raise ArithmeticError(
                f"the result for {self.what} has a relative error of {error:.2g}, and at most "
                f"{limit:.2g} is expected"
            )
        return error


Comparisons: TypeAlias = Iterator[Comparison]


def normal_numbers(backend: Backend) -> Callable[..., Tensor]:
    """Return a function that makes random tensors of a shape, the same ones in each process."""
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return x.to(device=backend.device, dtype=dtype or backend.dtype)

    return new


def add_rms_norm(backends: Backends, size: int, weight_dtype: torch.dtype) -> Comparisons:
    new = normal_numbers(backends[0])
    x, added = new(2, 3, size)
    weight = new(size, dtype=weight_dtype)
    for adds in (False, True):
        results = [
            backend.add_rms_norm(x.clone(), added.clone() if adds else None, weight, 1e-6)
            for backend in backends
        ]
        for what, found, wanted in zip(("the norm", "the sum"), *results, strict=True):
            yield Comparison(what, found, wanted)


def activation(backends: Backends, name: str, size: int) -> Comparisons:
    """Compare a method of the backends, such as "silu_and_mul"."""
    x = normal_numbers(backends[0])(3, 2 * size)
    found, wanted = (getattr(backend, name)(x.clone()) for backend in backends)
    yield Comparison("3 rows", found, wanted)


def sample(backends: Backends, vocab_size: int) -> Comparisons:
    """Compare tokens of greedy rows, of rows without a filter, and of rows with each filter.

    The logits are in the model's dtype, and in float32, the dtype of logits with rules.
    """
    device = backends[0].device
    # 8 pairs of tokens, of which one is at the end, have the same probabilities for each vocabulary
    # and dtype. With random logits, rounding could decide a token.
    logits = torch.full((48, vocab_size), -20.0, dtype=torch.float32, device=device)
    pair = torch.arange(8, device=device)
    second = torch.arange(2, device=device)[:, None]
    logits[:, (pair + 1) * vocab_size // 8 - 1 - second] = pair / 2 + second
    # Temperature, top_k, top_p and min_p of 6 rows, 8 times.
    columns = (0, 1, 2, 1.5, 1, 1), (0, 0, 0, 2, 0, 0), (1, 1, 1, 1, 0.6, 1), (0, 0, 0, 0, 0, 0.4)
    params = torch.tensor(columns, dtype=torch.float32, device=device).repeat(1, 8)
    seeds = torch.arange(48, device=device)
    batch = sampling_batch(params, 7 * seeds, seeds)
    for dtype in dict.fromkeys((backends[0].dtype, torch.float32)):
        found, wanted = (backend.sample(logits.to(dtype), batch) for backend in backends)
        yield Comparison(f"48 rows in {dtype}", found[:, None], wanted[:, None])


def filled(
    backends: Iterable[Backend], projections: dict[str, int], weight: Tensor
) -> list[Linear]:
    """Return a Linear of each backend with the weight [outputs, inputs]."""
    modules = [Linear(weight.shape[1], projections, backend) for backend in backends]
    for module in modules:
        module.weight.copy_(weight)
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
    ups, downs = expert_linears(backends, new, num, size, hidden)
    for tokens in (3, 16 * num):
        x = new(tokens, hidden)
        choices = (torch.arange(2 * tokens, device=x.device) ** 2 % num).view(tokens, 2)
        weights = new(tokens, 2)
        found, wanted = (
            (up.backend.expert_mlp(up, down) or expert_mlp)(x, weights, choices, up, down)
            for up, down in zip(ups, downs, strict=True)
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
    rows = torch.tensor([3, 0, 1], device=x.device)
    size = sizes[1] * sizes[3]
    results = []
    for backend in backends:
        decode, chunk = kernels_of(backend)
        states = (conv.clone(), rule.clone())
        out = x.new_zeros(133, size)
        chunk(layer, x, *states, Segments([2, 0], [0, 130], [130, 133], [True, False]), out)
        results.append((out, decode(layer, x[:3].contiguous(), *states, rows), *states))
    names = "chunks", "decodes", "the state of the convolution", "the state of the rule"
    for name, found, wanted in zip(names, *results, strict=True):
        yield Comparison(name, found, wanted, factor=4)


def linear_attention(
    new: Callable[..., Tensor], sizes: tuple[int, int, int, int], tokens: int, rows: int
) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Return a layer, its projections of `tokens`, and the states of `rows`, made by `new`."""
    key_heads, heads, key_dim, value_dim = sizes
    wide = partial(new, dtype=torch.float32)
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
    window: int = 0,
    *,
    empty: float,
    contexts: Sequence[int] = CONTEXTS,
    query_lens: Sequence[int] = (CHUNK, 1, 1, 1),
) -> Iterator[tuple[PlainAttention, Tensor, ForwardBatch]]:
    """Yield for each backend its attention, the result of `norm_rope_store` and the batch.

    Sequences with one new token decode, and are last. Slots of no token contain the number `empty`.
    A window is at most 450, so that a part of the largest context is outside it.

    heads: numbers of query heads and KV heads, and their size.
    norm_dtype: dtype of the weights of the norms of q and k, or None for no norms.
    """
    num_heads, kv_heads, dim = heads
    kernels, _ = backends
    new = normal_numbers(kernels)
    num_tokens = sum(query_lens)
    # The blocks of the sequences are in any order. Padding is the null block.
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0), device="cpu")
    tables = enumerate((order + 1).split(counts))
    greedy = RowSampling(temperature=0.0, seed=0)
    new_rows = [NewRow(row, table.tolist(), greedy) for row, table in tables]
    rows = Rows(len(contexts), max(counts), block_size, kernels.device)

    def batch_of(lens: Sequence[int], new_rows: Sequence[NewRow] = ()) -> ForwardBatch:
        """The last `lens` tokens of the contexts."""
        pairs = enumerate(zip(contexts, lens, strict=True))
        chunks = [Chunk(row, end - num, [0] * num, ResultKind.TOKEN) for row, (end, num) in pairs]
        plan = StepPlan([*new_rows], chunks=chunks)
        rows.apply(plan)
        return rows.build(plan).forward_batch

    earlier, batch = batch_of(contexts, new_rows), batch_of(query_lens)
    kv = new(2, sum(contexts), kv_heads, dim)
    qkv = new(num_tokens, (num_heads + 2 * kv_heads) * dim)
    norms = None if norm_dtype is None else tuple(new(2, dim, dtype=norm_dtype))
    angle = new(num_tokens, 1, dim // 2, dtype=torch.float32)
    cos, sin = angle.cos().to(qkv.dtype), angle.sin().to(qkv.dtype)
    rope = torch.cat((cos, cos), dim=2), torch.cat((-sin, sin), dim=2)
    config: Any = SimpleNamespace(
        **dict(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=dim),
        **dict(kv_layers=[0], rms_norm_eps=1e-6, windows=[min(window, 450)]),
    )
    sizes = config, sum(counts) + 1, block_size, kernels.dtype, kernels.device
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
    results: list[tuple[Tensor, Tensor]] = []
    for attention, q, _ in attention_step(backends, *sizes, empty=0.0):
        blocks = torch.arange(attention.cache.shape[2], device=q.device)
        kv = attention.read_blocks(0, blocks).view(-1, dim)
        results.append((q[:, :num_heads].flatten(1), kv))
    found, wanted = results
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
    factor = 2 if sizes[3] else 1  # in fp8
    yield Comparison("a chunk", found[:CHUNK], wanted[:CHUNK], factor)
    yield Comparison("decodes", found[CHUNK:], wanted[CHUNK:], factor)
