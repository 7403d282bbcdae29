"""The Triton kernels on a GPU. With `-n 8`, eight processes compile them."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import delta_rule_cases
import numpy as np
import pytest
import references
import torch
from gpu_cases import DEVICE, MARKS, TOLERANCE, error, needs_fp8, paged
from torch import Tensor
from torch.nn import functional as F

from nanovllm.backends.int4 import Int4Weight
from nanovllm.backends.int8 import Int8Weight
from nanovllm.features.models.hybrid.delta_rule import Segments
from nanovllm.features.models.moe.experts import expert_linear
from nanovllm.models import sampler
from nanovllm.models.backend import Backend
from nanovllm.models.batch import SamplingBatch
from nanovllm.models.fp8 import FP8

pytestmark = MARKS


REPEATS, LONG = 20, 4096  # launches on the same inputs, and tokens of a segment
# Query heads, KV heads and the size of a head.
SHAPES = [
    (16, 8, 128),
    (28, 4, 128),
    (4, 2, 64),
    (5, 5, 80),
    (8, 1, 96),
    (16, 1, 256),
]
TWO_SHAPES = (16, 8, 128), (5, 5, 80)


# (shape, block size, dtype, is fp8): all shapes in bfloat16, and some of them in all else.
ATTENTION = [
    *((shape, 16, torch.bfloat16, False) for shape in SHAPES),
    *((shape, 16, torch.bfloat16, True) for shape in (*TWO_SHAPES, (4, 2, 64), (16, 1, 256))),
    *((shape, 256, torch.bfloat16, fp8) for shape in TWO_SHAPES for fp8 in (False, True)),
    *((TWO_SHAPES[0], 16, dtype, True) for dtype in (torch.float16, torch.float32)),
    *(
        (shape, 16, dtype, False)
        for shape in TWO_SHAPES
        for dtype in (torch.float16, torch.float32)
    ),
]


@pytest.mark.parametrize(("shape", "size", "dtype", "fp8"), ATTENTION, ids=str)
def test_attention(shape: tuple[int, int, int], size: int, dtype: torch.dtype, fp8: bool) -> None:
    """In fp8 against the reference on the same numbers, which it multiplies by the scales."""
    from nanovllm.backends.gpu.kernels import attention
    from nanovllm.backends.gpu.kernels.configs import GpuInfo, decode_tile, prefill_tile

    heads, kv_heads, dim = shape
    torch.manual_seed(0)
    gpu = GpuInfo.of(torch.device(DEVICE))
    contexts = [1, 15, 16, 17, 255, 256, 257, 1000, 3001]
    cache_dtype, scales = dtype, (1.0, 1.0)
    if fp8:
        needs_fp8()
        cache_dtype, scales = FP8, (0.3, 1.7)
    k, v, tables, lens = paged(contexts, kv_heads, dim, size, cache_dtype)
    narrow = decode_tile(gpu, dim, dtype, fp8)
    wide = prefill_tile(gpu, dim, dtype)
    for queries in ([1] * 9, [1, 15, 1, 17, 200, 1, 257, 129, 99]):
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32).to(DEVICE)
        q = torch.randn(sum(queries), heads, dim, device=DEVICE).to(dtype)
        wanted = references.attend(q.float(), k, v, starts, lens, tables, *scales)
        per_tile = wide.num_rows // (heads // kv_heads)
        tiles = torch.from_numpy(attention.query_tiles(np.array(queries), per_tile)).to(DEVICE)
        found = torch.full_like(q, float("nan"))
        attention.attend(q, k, v, tiles, starts, lens, tables, wide, found, *scales)
        assert error(found, wanted) < TOLERANCE[dtype]
        if queries[-1] == 1:
            for splits in (1, 2, 7, 64):
                found.fill_(float("nan"))
                attention.attend_decode(
                    q, k, v, lens.argsort(), lens, tables, narrow, splits, found, *scales
                )
                assert error(found, wanted) < TOLERANCE[dtype], splits


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_store_in_fp8(dtype: torch.dtype) -> None:
    """Every rounding: beyond 448 saturates, NaN remains NaN. Without a rotation k is exact too."""
    from nanovllm.backends.gpu.kernels import store

    needs_fp8()
    torch.manual_seed(0)
    heads, kv_heads, dim, tokens = 4, 8, 128, 300
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE)
    qkv = (qkv * torch.exp(3 * torch.randn_like(qkv))).to(dtype)
    qkv[:, 0::97], qkv[:, 1::97], qkv[:, 2::97] = float("nan"), 6e4, -6e4
    ones = torch.ones(tokens, 1, dim, dtype=dtype, device=DEVICE)
    slots = torch.randperm(40 * 16, device=DEVICE)[:tokens]
    for scales in ((1.0, 1.0), (0.25, 4.0)):  # powers of 2, so that a division is exact
        shape = (40, kv_heads, 16, dim)
        caches = [torch.zeros(shape, device=DEVICE).to(FP8) for _ in range(4)]
        arguments = (qkv, None, None, 0.0, ones, ones - 1, slots)
        store.norm_rope_store(*arguments, *caches[:2], *scales)
        references.norm_rope_store(*arguments, *caches[2:], *scales)
        for found, wanted in zip(caches[:2], caches[2:], strict=True):
            found, wanted = found.float(), wanted.float()
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


DELTA_RULE = [
    ((16, 32, 128, 128), torch.bfloat16),
    ((16, 32, 128, 128), torch.float32),
    ((16, 48, 128, 128), torch.bfloat16),
    ((2, 2, 16, 24), torch.float32),
]


@pytest.mark.parametrize(("sizes", "dtype"), DELTA_RULE, ids=str)
@pytest.mark.parametrize("same_key", [False, True])
def test_delta_rule(sizes: tuple[int, int, int, int], dtype: torch.dtype, same_key: bool) -> None:
    """The tolerance is higher, because outputs are rounded before their norm, and TF32 is used."""
    from nanovllm.backends.gpu.kernels import delta_rule

    def compare(found: Tensor, wanted: Tensor) -> None:
        assert error(found, wanted) < max(4 * TOLERANCE[dtype], 1e-4)

    torch.manual_seed(0)
    layer = delta_rule_cases.make_layer(sizes, dtype, DEVICE)
    delta_rule_cases.check_decode(delta_rule, layer, [4, 0, 3], compare)
    lengths = [(64, False), (0, True), (2, False), (1000, True), (1, False)]
    delta_rule_cases.check_chunk(delta_rule, layer, lengths, compare, same_key)


# All layers of aligned sizes share their variants.
QUANTIZED = [
    *(((4096, 1024), dtype) for dtype in TOLERANCE),
    ((1024, 3072), torch.bfloat16),
    ((151_936, 1024), torch.bfloat16),
    ((199, 70), torch.bfloat16),
    ((199, 70), torch.float32),
]


@pytest.mark.parametrize(("shape", "dtype"), QUANTIZED, ids=str)
@pytest.mark.parametrize("weights", [Int8Weight, Int4Weight])
def test_quantized_linear(weights: type, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Against the reference in float32, with the weights as they are stored.

    More than 512 rows are multiplied by torch, a part of the weights at a time.
    """
    from nanovllm.backends.gpu.kernels import linear

    torch.manual_seed(0)
    weight = weights.empty(partial(torch.empty, dtype=dtype, device=DEVICE), *shape)
    weight.copy_(torch.randn(shape, device=DEVICE))
    exact = replace(weight, dtype=torch.float32).dequantized()
    biases = [torch.randn(shape[0], device=DEVICE).to(dtype)]
    for bias in [*biases, None] if dtype == torch.bfloat16 else biases:
        layer = SimpleNamespace(weight=weight, bias=bias)
        for rows in (1, 16, 17, 32, 33, 64, 65, 128, 129, 512, 513):
            x = torch.randn(rows, shape[1], device=DEVICE).to(dtype)
            wanted = F.linear(x.float(), exact, None if bias is None else bias.float())
            assert error(linear.linear(x, layer), wanted) < TOLERANCE[dtype], rows


EXPERTS = [
    (None, torch.bfloat16),
    (None, torch.float32),
    (Int8Weight, torch.bfloat16),
    (Int8Weight, torch.float16),
    (Int4Weight, torch.bfloat16),
]


@pytest.mark.parametrize(("weights", "dtype"), EXPERTS, ids=str)
def test_expert_linear(weights: type | None, dtype: torch.dtype) -> None:
    """Experts of Qwen3-30B-A3B's size with random numbers of rows, and one expert with all rows."""
    from nanovllm.backends.gpu.kernels import linear

    torch.manual_seed(0)
    outputs, inputs, num = 768, 2048, 16
    weight = torch.randn(num * outputs, inputs, device=DEVICE).to(dtype) / inputs**0.5
    stored, wide = weight, weight.float()
    if weights is not None:
        stored = weights.empty(partial(torch.empty, dtype=dtype, device=DEVICE), *weight.shape)
        stored.copy_(weight)
        wide = replace(stored, dtype=torch.float32).dequantized()
    module = SimpleNamespace(weight=stored)
    plain = SimpleNamespace(weight=wide, backend=Backend(torch.device(DEVICE), torch.float32))
    for rows in (1, 8, 100, 1000):
        for choices in (torch.randint(num, (rows,)), torch.full((rows,), num - 1)):
            ends = choices.bincount(minlength=num).cumsum(0).to(DEVICE)
            x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
            found = linear.expert_linear(x, module, ends)
            assert error(found, expert_linear(x.float(), plain, ends)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sampler(dtype: torch.dtype) -> None:
    """The reference's tokens, but where sums in another order fall on the other side of an edge."""
    from nanovllm.backends.gpu.kernels.sampler import sample

    torch.manual_seed(0)
    rows, size = 256, 151_936
    logits = (4 * torch.randn(rows, size, device=DEVICE)).to(dtype)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values, device=DEVICE)[torch.randint(len(values), (rows,))]

    batch = SamplingBatch(
        temperature=pick(0.0, 0.6, 1.0),
        filters={
            "top_k": pick(0, 0, 1, 20, 50, 5000).long(),  # 5000 is more than the chunks
            "top_p": pick(1.0, 0.95, 0.5),
            "min_p": pick(0.0, 0.05),
        },
        seeds=torch.randint(2**62, (rows,), device=DEVICE),
        positions=torch.randint(10_000, (rows,), device=DEVICE),
    )
    found = sample(logits, batch)
    wanted = sampler.sample(logits.float(), batch)
    assert float((found == wanted).float().mean()) > 0.98


@pytest.mark.parametrize("heads", [32, 48])
def test_the_delta_rule_has_the_same_bits_each_time(heads: int) -> None:
    """Known races of Triton on Hopper and Blackwell concern products like its own."""
    from nanovllm.backends.gpu.kernels import delta_rule

    torch.manual_seed(0)
    layer = delta_rule_cases.make_layer((16, heads, 128, 128), torch.bfloat16, DEVICE)
    x = delta_rule_cases.make_inputs(layer, LONG + 130)
    states = delta_rule_cases.make_states(layer)
    results = []
    for _ in range(REPEATS):
        conv, rule = (state.clone() for state in states)
        out = x.new_zeros((len(x), heads * 128))
        segments = Segments([3, 1], [0, LONG], [LONG, len(x)], [True, False])
        delta_rule.chunk(layer, x, conv, rule, segments, out)
        results.append((out, rule))
    check_same_bits(results)


@pytest.mark.parametrize("weights", [Int8Weight, Int4Weight])
def test_quantized_products_have_the_same_bits_each_time(weights: type) -> None:
    from nanovllm.backends.gpu.kernels import linear

    torch.manual_seed(0)
    weight = weights.empty(partial(torch.empty, dtype=torch.bfloat16, device=DEVICE), 4096, 1024)
    weight.copy_(torch.randn(4096, 1024, device=DEVICE))
    layer = SimpleNamespace(weight=weight, bias=None)
    for rows in (1, 17, 33, 65):
        x = torch.randn(rows, 1024, device=DEVICE).bfloat16()
        check_same_bits([(linear.linear(x, layer),) for _ in range(REPEATS)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_prompts_have_the_same_bits_each_time(dtype: torch.dtype) -> None:
    """Triton 3.6.0 has no fence between copies to shared memory and the products that read them."""
    from nanovllm.backends.gpu.kernels import attention
    from nanovllm.backends.gpu.kernels.configs import GpuInfo, prefill_tile

    if dtype == FP8:
        needs_fp8()
    torch.manual_seed(0)
    heads, kv_heads, dim = SHAPES[0]
    k, v, tables, lens = paged([LONG, 300], kv_heads, dim, 16, dtype)
    tile = prefill_tile(GpuInfo.of(torch.device(DEVICE)), dim, torch.bfloat16)
    q = torch.randn(LONG + 99, heads, dim, device=DEVICE).bfloat16()
    starts = torch.tensor([0, LONG, len(q)], dtype=torch.int32).to(DEVICE)
    tiles = attention.query_tiles(np.array([LONG, 99]), tile.num_rows * kv_heads // heads)
    arguments = q, k, v, torch.from_numpy(tiles).to(DEVICE), starts, lens, tables, tile
    results = [torch.empty_like(q) for _ in range(REPEATS)]
    for found in results:
        attention.attend(*arguments, found)
    check_same_bits([(found,) for found in results])


def check_same_bits(results: list[tuple[Tensor, ...]]) -> None:
    for result in results[1:]:
        for found, first in zip(result, results[0], strict=True):
            assert torch.equal(found, first)
