"""Every Triton kernel in the interpreter, compared with its plain PyTorch reference.

The tolerance is 1e-5 in float32 and a few roundings in float16. The interpreter computes bfloat16
incorrectly (up to Triton 3.9): .ci/compile_kernels.py compiles it, and `pytest -m gpu` runs it.
"""

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import references
import torch
from checkpoints import check_greedy, prompts_of, random_llm
from family_checkpoints import FAMILIES, make_family_checkpoint
from gpu_cases import Paged, paged
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

triton = pytest.importorskip("triton")
VERSION = tuple(int(x) for x in triton.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or VERSION < (3, 7),
    reason="needs Triton's interpreter with loops up to the value of a tensor (3.7 or later)",
)

from triton import language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.backends.gpu.kernels import (  # noqa: E402
    attention,
    conversions,
    linear,
    sampler,
    store,
)
from nanovllm.backends.gpu.kernels.configs import Tile  # noqa: E402
from nanovllm.backends.int4 import Int4Weight  # noqa: E402
from nanovllm.backends.int8 import Int8Weight, weight_only  # noqa: E402
from nanovllm.features.models.moe.experts import expert_linear  # noqa: E402
from nanovllm.models import sampler as plain_sampler  # noqa: E402
from nanovllm.models.backend import Backend  # noqa: E402
from nanovllm.models.batch import SamplingBatch  # noqa: E402
from nanovllm.models.fp8 import FP8  # noqa: E402
from nanovllm.models.rope import RopeConfig, RotaryEmbedding  # noqa: E402

NAN = float("nan")
BRIEF = settings(max_examples=20, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**31)
DTYPES = st.sampled_from([torch.float32, torch.float16])


def close(actual: Tensor, expected: Tensor) -> None:
    """Compare to 1e-5 in float32 and to a few roundings in float16; NaN never passes."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    tolerance = 1e-5 if expected.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def lengths(size: int) -> st.SearchStrategy[int]:
    """One token, and lengths around the boundaries of blocks and of tiles of 16 keys."""
    edges = {1, 2, 15, 16, 17, 31, 32, 33, size - 1, size, size + 1}
    return st.sampled_from(sorted(n for n in edges if n > 0)) | st.integers(1, 70)


@st.composite
def cases(draw: st.DrawFn, decode: bool) -> dict[str, object]:
    size = draw(st.sampled_from([16, 32, 48, 256]))
    contexts = draw(st.lists(lengths(size), min_size=1, max_size=3))
    return dict(
        seed=draw(SEEDS),
        size=size,
        contexts=contexts,
        # The last tokens of a context are queries: whole prompts, chunks, and after prefix hits.
        queries=[1 if decode else draw(st.integers(1, min(n, 40))) for n in contexts],
        dim=draw(st.sampled_from([32, 64, 80, 96, 128])),
        kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 3, 7, 16] if decode else [1, 2, 3, 7])),
        dtype=draw(DTYPES),
        # Of an fp8 cache; None: the cache has the dtype of q.
        scales=draw(st.sampled_from([None, None, (1.0, 1.0), (0.3, 1.7)])),
        window=draw(st.sampled_from([0, 0, 1, 15, 16, 17, 40, 300])),
    )


def attention_inputs(case: dict) -> tuple[Paged, Tensor, Tensor]:
    torch.manual_seed(case["seed"])
    dtype = FP8 if case["scales"] else case["dtype"]
    kv = paged(case["contexts"], case["kv_heads"], case["dim"], case["size"], dtype, "cpu")
    starts = torch.tensor([0, *torch.tensor(case["queries"]).cumsum(0)], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), case["kv_heads"] * case["group"], case["dim"])
    return kv, q.to(case["dtype"]), starts


def query_tiles(query_lens: list[int], queries_per_tile: int) -> Tensor:
    return torch.from_numpy(attention.query_tiles(np.array(query_lens), queries_per_tile))


def spoil_earlier_tiles(kv: Paged, case: dict) -> None:
    """Store NaN before the tile of 16 keys with the first one in the window of the first query.

    A program that read one of these tiles would compute NaN.
    """
    for table, length, num in zip(kv.tables, case["contexts"], case["queries"], strict=True):
        first = max(0, length - num + 1 - case["window"]) // 16 * 16 if case["window"] else 0
        position = torch.arange(first)
        block, slot = table[position // case["size"]].long(), position % case["size"]
        kv.k[block, :, slot] = kv.v[block, :, slot] = torch.full((), NAN).to(kv.k.dtype)


@pytest.mark.slow
@BRIEF
@given(case=cases(decode=False), rows=st.sampled_from([16, 32]))
def test_attend(case: dict, rows: int) -> None:
    kv, q, starts = attention_inputs(case)
    tiles = query_tiles(case["queries"], rows // case["group"])
    actual = torch.full_like(q, NAN)
    scales = *(case["scales"] or (1.0, 1.0)), case["window"]
    tile = Tile(rows, 16, 4, 1)
    expected = references.attend(q, kv.k, kv.v, starts, kv.contexts, kv.tables, *scales)
    spoil_earlier_tiles(kv, case)
    attention.attend(q, kv.k, kv.v, tiles, starts, kv.contexts, kv.tables, tile, actual, *scales)
    close(actual, expected)


@pytest.mark.slow
@BRIEF
@given(case=cases(decode=True), splits=st.sampled_from([1, 2, 3, 8]))
def test_attend_decode(case: dict, splits: int) -> None:
    """Splits have at least 32 positions here, so that short contexts are split and merged too."""
    kv, q, starts = attention_inputs(case)
    scales = *(case["scales"] or (1.0, 1.0)), case["window"]
    expected = references.attend(q, kv.k, kv.v, starts, kv.contexts, kv.tables, *scales)
    spoil_earlier_tiles(kv, case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MIN_SPLIT_SIZE", 32)
        actual = torch.full_like(q, NAN)
        attention.attend_decode(
            q,
            kv.k,
            kv.v,
            kv.contexts.argsort(descending=True),
            kv.contexts,
            kv.tables,
            Tile(16, 16, 4, 1),
            splits,
            actual,
            *scales,
        )
    close(actual, expected)


@pytest.mark.slow
def test_a_cache_of_more_than_2_31_elements() -> None:
    """Offsets must be 64-bit. Only the last blocks of each 4.6 GB cache are touched."""
    torch.manual_seed(0)
    shape = (140_000, 8, 16, 128)
    k, v = torch.empty(shape, dtype=torch.float16), torch.empty(shape, dtype=torch.float16)
    assert k.numel() > 2**31
    last = torch.arange(shape[0] - 2, shape[0], dtype=torch.int32)[None]
    ones = torch.ones(32, 1, 128, dtype=torch.float16)
    slot_mapping = torch.arange((shape[0] - 2) * 16, shape[0] * 16)
    q = store.norm_rope_store(
        torch.randn(32, 24 * 128).half(), None, None, 0.0, ones, ones, slot_mapping, k, v
    )[-1:]
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([32])
    expected = references.attend(q, k, v, starts, lens, last)
    tile = Tile(16, 16, 4, 1)
    actual = torch.empty_like(q)
    attention.attend_decode(q, k, v, torch.tensor([0]), lens, last, tile, 1, actual)
    close(actual, expected)
    tiles = query_tiles([1], 8)
    attention.attend(q, k, v, tiles, starts, lens, last, tile, actual.fill_(NAN))
    close(actual, expected)


def test_reference_equals_torch_attention() -> None:
    torch.manual_seed(0)
    kv = paged([33], 2, 32, 16, torch.float32, "cpu")
    q = torch.randn(33, 4, 32)
    starts = torch.tensor([0, 33], dtype=torch.int32)
    actual = references.attend(q, kv.k, kv.v, starts, kv.contexts, kv.tables)
    position = torch.arange(33)
    block = kv.tables[0].long()[position // 16]
    k, v = (cache[block, :, position % 16].transpose(0, 1) for cache in (kv.k, kv.v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k, v, is_causal=True, enable_gqa=True
    )
    close(actual, expected.transpose(0, 1))


def test_tiles_cover_each_query_once() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        number = int(torch.randint(1, 9, (1,), generator=generator))
        counts = torch.randint(1, 40, (number,), generator=generator).tolist()
        for queries in (1, 5, 16):
            covered = [
                (seq, query)
                for seq, first in query_tiles(counts, queries).tolist()
                for query in range(first, min(first + queries, counts[seq]))
            ]
            assert covered == [(s, q) for s, n in enumerate(counts) for q in range(n)]


def test_splits_fill_the_gpu_and_no_more() -> None:
    assert attention.num_splits(256, 8, 396) == 1
    assert attention.num_splits(8, 8, 396) == 12
    assert attention.num_splits(1, 2, 10**6) == attention.MAX_SPLITS


@pytest.mark.slow
@BRIEF
@given(
    seed=SEEDS,
    tokens=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (6, 3)]),
    dim=st.sampled_from([32, 64, 80, 96, 128]),
    norm=st.booleans(),
    dtype=DTYPES,
    scales=st.sampled_from([None, None, (1.0, 1.0), (0.3, 0.002)]),
)
def test_norm_rope_store(
    seed: int,
    tokens: int,
    heads: tuple[int, int],
    dim: int,
    norm: bool,
    dtype: torch.dtype,
    scales: tuple[float, float] | None,
) -> None:
    """In an fp8 cache too, where 0.002 makes v larger than 448."""
    torch.manual_seed(seed)
    num, kv_heads = heads
    qkv = torch.randn(tokens, (num + 2 * kv_heads) * dim).to(dtype)
    weights = [torch.rand(dim).to(dtype) + 0.5 if norm else None for _ in range(2)]
    tables = RotaryEmbedding(dim, 200, [RopeConfig()], like=torch.empty(0))
    cos, sin = (x.to(dtype) for x in tables.at(torch.randint(200, (tokens,)))[0])
    slot_mapping = torch.randperm(5 * 16)[:tokens]
    shape, cache_dtype = (5, kv_heads, 16, dim), FP8 if scales else dtype
    caches = [torch.full(shape, NAN, dtype=cache_dtype) for _ in range(4)]
    inputs, scales = (qkv, *weights, 1e-6, cos, sin, slot_mapping), scales or ()
    actual = store.norm_rope_store(*inputs, *caches[:2], *scales)
    expected = references.norm_rope_store(*inputs, *caches[2:], *scales)
    close(actual, expected)
    for cache, expected_cache in zip(caches[:2], caches[2:], strict=True):
        # No other slot was written.
        assert torch.equal(cache.isnan(), expected_cache.isnan())
        found, wanted = (x.float().nan_to_num() for x in (cache, expected_cache))
        if scales:
            # The interpreter drops the carry when it rounds up to a power of 2, and the digits of
            # subnormal numbers. A sum in another order may be rounded to another neighbour.
            kept = torch.frexp(wanted).mantissa.abs() != 0.5
            assert (found == wanted)[kept].float().mean() > 0.97
            torch.testing.assert_close(found[kept], wanted[kept], atol=2**-9, rtol=1 / 8)
        else:
            close(found.to(dtype), wanted.to(dtype))


@pytest.mark.slow
@BRIEF
@given(
    seed=SEEDS,
    rows=st.sampled_from([1, 2, 16, 17, 33, 65, 128, 129, 257, 513]),
    shape=st.sampled_from([(64, 64), (70, 70), (16, 300), (199, 96)]),
    bias=st.booleans(),
    dtype=DTYPES,
)
@pytest.mark.parametrize("weight_class", [Int8Weight, Int4Weight])
def test_quantized_linear(
    weight_class: Any, seed: int, rows: int, shape: tuple[int, int], bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    weight = weight_class.empty(partial(torch.empty, dtype=dtype), *shape)
    weight.copy_(torch.randn(shape) / shape[1] ** 0.5)
    module = SimpleNamespace(weight=weight, bias=torch.randn(shape[0]).to(dtype) if bias else None)
    x = torch.randn(rows, shape[1]).to(dtype)
    close(linear.linear(x, module), weight_only(x, module))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weight_class", [Int8Weight, Int4Weight])
def test_many_rows_convert_a_part_of_the_weights_at_a_time(
    weight_class: type[Int8Weight], bias: bool, monkeypatch
) -> None:
    torch.manual_seed(0)
    weight = weight_class.empty(torch.empty, 70, 64)
    weight.copy_(torch.randn(70, 64))
    module = SimpleNamespace(weight=weight, bias=torch.randn(70) if bias else None)
    x = torch.randn(max(linear.HALF) + 1, 64)
    expected, sizes, dequantized = weight_only(x, module), [], weight_class.dequantized

    def spy(part: Int8Weight) -> Tensor:
        sizes.append(part.values.shape[0])
        return dequantized(part)

    monkeypatch.setattr(weight_class, "dequantized", spy)
    monkeypatch.setattr(linear, "PART", 32 * 64)
    close(linear.linear(x, module), expected)
    assert sizes == [32, 32, 6]


def test_a_row_and_a_query_have_the_same_bits_in_any_part(monkeypatch) -> None:
    """The kernels of batch_invariant=True, also of a last token alone, as a decode has it."""
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        """A sum without roundings: NumPy's depends on where a row is in the tile."""
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).half() for shape in ((150, 70), (96, 70), (96,)))
    module: Any = SimpleNamespace(weight=weight, bias=bias)
    whole = linear.invariant_linear(x, module)
    close(whole, F.linear(x, weight, bias))
    k, v, tables, _ = paged([150], 2, 32, 16, torch.float16, device="cpu")
    q, tile = torch.randn(150, 4, 32).half(), Tile(32, 32, 4, 2)

    def attend(start: int, end: int, window: int) -> Tensor:
        tiles = torch.from_numpy(attention.query_tiles(np.array([end - start]), 16))
        starts, out = torch.tensor([0, end - start], dtype=torch.int32), q[start:end] * NAN
        sizes = tiles, starts, torch.tensor([end]), tables, tile
        attention.attend(q[start:end], k, v, *sizes, out, window=window, loops=1)
        return out

    starts, lens = torch.tensor([0, 150], dtype=torch.int32), torch.tensor([150])
    for window in (0, 1, 40):
        attended = attend(0, 150, window)
        close(attended, references.attend(q, k, v, starts, lens, tables, window=window))
        for start, end in ((0, 37), (37, 149), (149, 150), (64, 65)):
            assert torch.equal(attend(start, end, window), attended[start:end])
            assert torch.equal(linear.invariant_linear(x[start:end], module), whole[start:end])


def run_ptx(code: str, x: Tensor) -> list[Tensor]:
    """Return $0 and $1 [N, 1] int32 for x [N, 1] int32, by the definitions of the PTX ISA."""

    def permute(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
        both = torch.cat((a, b), 1).view(torch.uint8)
        chosen = [int(selector[0]) >> shift & 7 for shift in (0, 4, 8, 12)]
        return both[:, chosen].view(torch.int32)

    def fma(*args: Tensor) -> Tensor:
        a, b, c = (y.view(torch.bfloat16).double() for y in args)
        return (a * b + c).bfloat16().view(torch.int32)

    operations: dict[str, Callable[..., Tensor]] = {
        "mov.b32": lambda a: a,
        "xor.b32": lambda a, b: a ^ b,
        "prmt.b32": permute,
        # The table of a lop3 is the function's value for 0xF0, 0xCC and 0xAA.
        "lop3.b32": lambda a, b, c, table: a & b | c if table[0] == 0xF0 & 0xCC | 0xAA else None,
        "sub.f16x2": lambda a, b: (a.view(torch.half) - b.view(torch.half)).view(torch.int32),
        "fma.rn.bf16x2": fma,
        "cvt.rn.f16x2.e4m3x2": lambda a: a.view(FP8).half().view(torch.int32),
    }
    registers = {"$2": x}
    for line in code.strip("{}").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if operation == "mov.b32" and rest.startswith("{low, high}"):
            registers["low"], registers["high"] = x.view(torch.int16).split(1, 1)
        elif operation not in ("", ".reg"):
            target, *names = rest.split(", ")
            numbers = [np.int64(int(n, 0)).astype(np.int32) for n in names if n not in registers]
            constants = iter([torch.full_like(x, int(n)) for n in numbers])
            values = [registers[n] if n in registers else next(constants) for n in names]
            registers[target] = operations[operation](*values)
    return [registers["$0"], registers["$1"]]


@pytest.mark.parametrize(
    ("code", "source", "dtype"),
    [
        (conversions.FP8_TO_FLOAT16, FP8, torch.float16),
        (conversions.INT8_TO_FLOAT16, torch.int8, torch.float16),
        (conversions.INT8_TO_BFLOAT16, torch.int8, torch.bfloat16),
    ],
)
def test_ptx_converts_every_byte_exactly(
    code: tl.constexpr, source: torch.dtype, dtype: torch.dtype
) -> None:
    every = torch.arange(256).to(torch.uint8).view(64, 4)
    found = torch.cat(run_ptx(code.value, every.view(torch.int32)), 1).view(dtype)
    expected = every.view(source).to(dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


COUNTS = [[1], [0, 3, 0, 0, 1], [2, 1, 65, 0, 3], [1] * 4, [0, 0, 0, 17], [33, 0, 0]]


@pytest.mark.parametrize("weights", [None, Int8Weight, Int4Weight])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_expert_linear(counts: list[int], weights: Any) -> None:
    """Experts without rows, with several tiles of rows, and one that has all rows."""
    torch.manual_seed(0)
    outputs, dtype = 40, torch.float16 if len(counts) == 5 else torch.float32
    for inputs in (64, 70) if len(counts) == 5 else (64,):
        stored = dense = torch.randn(len(counts) * outputs, inputs).to(dtype) / inputs**0.5
        if weights is not None:
            stored = weights.empty(partial(torch.empty, dtype=dtype), *dense.shape)
            stored.copy_(dense)
            dense = stored.dequantized()
        x, ends = torch.randn(sum(counts), inputs).to(dtype), torch.tensor(counts).cumsum(0)
        plain: Any = SimpleNamespace(weight=dense, backend=Backend(x.device, dtype))
        found = linear.expert_linear(x, SimpleNamespace(weight=stored), ends)
        close(found, expert_linear(x, plain, ends))


@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=9), rows=st.sampled_from([1, 16]))
def test_the_grid_has_a_tile_for_all_rows_of_experts(counts: list[int], rows: int) -> None:
    """However the router chooses. It has no more than the worst choice needs."""
    total = sum(counts)
    most = linear.max_tiles(total, len(counts), rows)
    assert sum(-(-count // rows) for count in counts) <= most
    worst = [1] * min(total, len(counts))
    worst[:1] = [1 + total - len(worst)] if total else []
    assert sum(-(-count // rows) for count in worst) == most


def same_tokens(logits: Tensor, batch: SamplingBatch) -> None:
    """The tokens equal those of the reference: same filters, same random numbers, same draw."""
    expected = plain_sampler.sample(logits.float(), batch)
    assert sampler.sample(logits, batch).tolist() == expected.tolist()


# (temperature, top_k, top_p, min_p). There are three chunks.
ROWS = [
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.5, 50, 0.8, 0.02),
    (3.0, 200, 1.0, 0.0),  # more than the chunks
    (3.0, 1000, 0.99, 0.0),  # more than the vocabulary
    (1e-38, 20, 0.95, 0.0),
    (50.0, 20, 0.5, 0.0),
    (0.0, 20, 0.5, 0.1),
]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("random", torch.bfloat16),
        ("random", torch.float32),
        ("few values", torch.float16),
        ("many", torch.float16),
        ("many", torch.bfloat16),
        ("few finite", torch.float32),
        ("negative", torch.bfloat16),
    ],
)
def test_sample_with_filters(kind: str, dtype: torch.dtype) -> None:
    """Of many logits in half precision, some are equal."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(len(ROWS), 2049 if kind == "many" else 300, generator=generator)
    if kind == "few values":
        logits = logits.round()
    if kind == "few finite":
        logits[torch.rand(logits.shape, generator=generator) < 0.97] = float("-inf")
    if kind == "negative":
        logits -= 100
    temperature, top_k, top_p, min_p = torch.tensor(ROWS).T.contiguous()
    filters = {"top_k": top_k.long(), "top_p": top_p, "min_p": min_p}
    ids = torch.arange(len(ROWS))
    same_tokens(logits.to(dtype), SamplingBatch(temperature, ids - 3, ids, filters))


@triton.jit
def first_above(weights, targets, out, N: tl.constexpr):
    i = tl.program_id(0)
    weight = tl.load(weights + tl.arange(0, N))
    tl.store(out + i, sampler._first_above(weight, tl.load(targets + i)))


def test_a_hidden_token_is_never_drawn(monkeypatch) -> None:
    """The cumulative sum is in the order of a tree, and targets are equal to its elements."""

    def scan(x: np.ndarray) -> np.ndarray:
        # Hillis and Steele 1986, as the threads of a warp do it.
        for step in (1 << i for i in range(7)):
            x = np.concatenate((x[:step], x[step:] + x[:-step]))
        return x

    def cumsum(self: Any, x: Any) -> list:
        return [self.to_tensor(scan(x.handle.data), x.dtype)]

    monkeypatch.setattr(triton.runtime.interpreter.ScanOps, "cumsum", cumsum)
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(128, generator=generator)
    weights[torch.rand(128, generator=generator) < 0.7] = 0
    cumulative = torch.from_numpy(scan(weights.numpy()))
    assert (cumulative.diff()[weights[1:] == 0] != 0).any()
    # A remainder may be negative, by rounding.
    targets = torch.cat((cumulative, torch.tensor([-1e-6, 0.0, 1e9])))
    chosen = torch.zeros(len(targets), dtype=torch.int32)
    first_above[(len(targets),)](weights, targets, chosen, N=128)
    assert (weights[chosen] > 0).all()
    exceeds = cumulative[chosen] > targets
    assert (exceeds | (chosen == weights.nonzero().max())).all()


# Answers of four tokens: each takes the interpreter a second.
QUESTIONS = {"sam backwards": "mas", "And aji in capitals?": "AJI"}


@pytest.mark.slow
def test_the_engine_answers_with_the_kernels() -> None:
    """The whole engine runs on the Triton backend: prefill, decode and every fused kernel."""
    llm = LLM(dtype="float32", device="cpu", attention_backend="triton", max_model_len=64)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    answers = [out.outputs[0].text for out in llm.chat(chats, use_tqdm=False)]
    assert answers == list(QUESTIONS.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_the_kernels(family: str, tmp_path) -> None:
    model = make_family_checkpoint(tmp_path, family)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    llm = random_llm(tmp_path, attention_backend="triton")
    check_greedy(model, llm.generate(prompts_of(5, 20), params, use_tqdm=False))


@pytest.fixture
def launches(monkeypatch) -> Callable[..., dict[str, tuple]]:
    """A function that calls a wrapper of a kernel module as on a GPU, without the interpreter.

    It returns {kernel: (what Triton specializes on, options)} of the launches.
    """
    # Triton imports this module when it first binds a tensor, and the import fails unless Triton is
    # still in the mode in which it was imported.
    importlib.import_module("triton.experimental.gluon")
    monkeypatch.delenv("TRITON_INTERPRET")
    backend = make_backend(GPUTarget("cuda", 90, 32))
    caught = {}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, _ = bind(*args, debug=False, **options)
        caught[kernel.__name__] = specialization, options

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)

    def launch(module: Any, wrapper: str, *args: Any) -> dict[str, tuple]:
        spec = importlib.util.find_spec(module.__name__)
        compiled = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiled)
        getattr(compiled, wrapper)(*args)
        return dict(caught)

    return launch


def test_slices_do_not_compile_kernels_again(launches: Callable[..., dict[str, tuple]]) -> None:
    """Slices of a batch start at any multiple of 4 or 8 bytes."""
    found = []
    tile = Tile(16, 16, 4, 1)
    for start in (0, 1):
        row, ids = torch.ones(9)[start:], torch.ones(9, dtype=torch.int64)[start:]
        lens, tables = ids, torch.zeros((9, 3), dtype=torch.int32)[start:]
        starts = torch.arange(10, dtype=torch.int32)[start:]
        q, cache = torch.zeros(9, 5, 80)[start:], torch.zeros(4, 5, 16, 80)
        order = lens.argsort()
        launches(attention, "attend_decode", q, cache, cache, order, lens, tables, tile, 2, q)
        tiles = torch.zeros((9, 2), dtype=torch.int32)
        launches(attention, "attend", q, cache, cache, tiles, starts, lens, tables, tile, q)
        batch = SamplingBatch(row, ids, ids, {"top_k": ids, "top_p": row, "min_p": row})
        module: Any = SimpleNamespace(weight=torch.zeros(64, 64))
        launches(linear, "expert_linear", torch.zeros(9, 64), module, starts[:4].long()[start:][:2])
        found.append(launches(sampler, "sample", torch.zeros(9, 300), batch))
    assert len(found[0]) == 6
    assert found[0] == found[1]
