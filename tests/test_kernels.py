"""Every kernel under Triton's interpreter, against its plain-torch reference.

Float32 to 1e-5, float16 to its own rounding. bf16 is wrong in the interpreter (through Triton 3.9):
it is compiled in .ci/compile_kernels.py and run by `pytest -m gpu`.
"""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

triton = pytest.importorskip("triton")
VERSION = tuple(int(x) for x in triton.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or VERSION < (3, 7),
    reason="needs Triton's interpreter, which cannot run a loop to a tensor's value before 3.7",
)

from nanovllm import LLM  # noqa: E402
from nanovllm.kernels import attention, blocks, pointwise, sampling, store  # noqa: E402
from nanovllm.kernels.configs import Tile  # noqa: E402
from nanovllm.layers.rotary import RotaryEmbedding  # noqa: E402
from nanovllm.runner import sampler  # noqa: E402
from nanovllm.runner.batch import SamplingBatch  # noqa: E402

NAN = float("nan")
BRIEF = settings(max_examples=20, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**31)
DTYPES = st.sampled_from([torch.float32, torch.float16])


def close(found: Tensor, wanted: Tensor) -> None:
    """1e-5 in float32, a few roundings in float16; a NaN never passes."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    tolerance = 1e-5 if wanted.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


class Paged:
    """Random keys and values of sequences, in blocks in random order; NaN wherever nothing is."""

    def __init__(
        self, contexts: list[int], kv_heads: int, dim: int, size: int, dtype: torch.dtype
    ) -> None:
        counts = [-(-n // size) for n in contexts]
        order = (torch.randperm(sum(counts) + 2) + 1).tolist()  # never block 0; two left over
        shape = (sum(counts) + 3, kv_heads, size, dim)
        self.k, self.v = torch.full(shape, NAN, dtype=dtype), torch.full(shape, NAN, dtype=dtype)
        self.tables = torch.zeros((len(contexts), max(counts) + 1), dtype=torch.int32)
        for seq, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            for i in range(count):
                block, used = order.pop(), min(size, context - i * size)
                self.tables[seq, i] = block
                for cache in (self.k, self.v):
                    cache[block, :, :used] = torch.randn(kv_heads, used, dim).to(dtype)
        self.contexts = torch.tensor(contexts)


def lengths(size: int) -> st.SearchStrategy[int]:
    """One token, and what lies at and around the edges of blocks and of tiles of 16 keys."""
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
        # Of a context, its last so many tokens are queries: whole prompts, chunks, prefix hits.
        queries=[1 if decode else draw(st.integers(1, min(n, 40))) for n in contexts],
        dim=draw(st.sampled_from([32, 64, 80, 96, 128])),
        kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 3, 7, 16] if decode else [1, 2, 3, 7])),
        dtype=draw(DTYPES),
    )


def attention_inputs(case: dict) -> tuple[Paged, Tensor, Tensor]:
    torch.manual_seed(case["seed"])
    kv = Paged(case["contexts"], case["kv_heads"], case["dim"], case["size"], case["dtype"])
    starts = torch.tensor([0, *torch.tensor(case["queries"]).cumsum(0)], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), case["kv_heads"] * case["group"], case["dim"])
    return kv, q.to(case["dtype"]), starts


@BRIEF
@given(case=cases(decode=False), rows=st.sampled_from([16, 32]))
def test_attend(case: dict, rows: int) -> None:
    kv, q, starts = attention_inputs(case)
    tiles = attention.query_tiles(starts, len(q), rows // case["group"])
    found = torch.full_like(q, NAN)
    attention.attend(
        q, kv.k, kv.v, tiles, starts, kv.contexts, kv.tables, Tile(rows, 16, 4, 1), found
    )
    close(found, attention.reference(q, kv.k, kv.v, starts, kv.contexts, kv.tables))


@BRIEF
@given(case=cases(decode=True), splits=st.sampled_from([1, 2, 3, 8]))
def test_attend_decode(case: dict, splits: int) -> None:
    """Splits of at least 32 positions here, so that short contexts are split and merged too."""
    kv, q, starts = attention_inputs(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MIN_SPLIT", 32)
        found = torch.full_like(q, NAN)
        attention.attend_decode(
            q, kv.k, kv.v, kv.contexts, kv.tables, Tile(16, 16, 4, 1), splits, found
        )
    close(found, attention.reference(q, kv.k, kv.v, starts, kv.contexts, kv.tables))


def test_a_cache_of_more_than_2_31_elements() -> None:
    """Of 4.6 GB each that are never touched, only the last blocks are: offsets must be 64-bit."""
    torch.manual_seed(0)
    shape = (140_000, 8, 16, 128)
    k, v = torch.empty(shape, dtype=torch.float16), torch.empty(shape, dtype=torch.float16)
    assert k.numel() > 2**31
    last = torch.arange(shape[0] - 2, shape[0], dtype=torch.int32)[None]
    turn = torch.ones(32, 1, 128, dtype=torch.float16)
    slots = torch.arange((shape[0] - 2) * 16, shape[0] * 16)
    q = store.rope_store(
        torch.randn(32, 24 * 128).half(), None, None, 0.0, turn, turn, slots, k, v
    )[-1:]
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([32])
    wanted = attention.reference(q, k, v, starts, lens, last)
    tile = Tile(16, 16, 4, 1)
    found = torch.empty_like(q)
    attention.attend_decode(q, k, v, lens, last, tile, 1, found)
    close(found, wanted)
    tiles = attention.query_tiles(starts, 1, 8)
    attention.attend(q, k, v, tiles, starts, lens, last, tile, found.fill_(NAN))
    close(found, wanted)


def test_reference_is_torchs_attention() -> None:
    torch.manual_seed(0)
    kv = Paged([33], 2, 32, 16, torch.float32)
    q = torch.randn(33, 4, 32)
    starts = torch.tensor([0, 33], dtype=torch.int32)
    found = attention.reference(q, kv.k, kv.v, starts, kv.contexts, kv.tables)
    at = torch.arange(33)
    where = kv.tables[0].long()[at // 16]
    k, v = kv.k[where, :, at % 16].transpose(0, 1), kv.v[where, :, at % 16].transpose(0, 1)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k, v, is_causal=True, enable_gqa=True
    )
    close(found, wanted.transpose(0, 1))


def test_tiles_cover_each_query_once() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        counts = torch.randint(1, 40, (int(torch.randint(1, 9, (1,), generator=generator)),))
        starts = torch.tensor([0, *counts.cumsum(0)], dtype=torch.int32)
        for queries in (1, 5, 16):
            tiles = attention.query_tiles(starts, int(starts[-1]), queries).tolist()
            covered = [
                (seq, query)
                for seq, first in tiles
                if seq < len(counts)
                for query in range(first, min(first + queries, int(counts[seq])))
            ]
            assert covered == [(s, q) for s, n in enumerate(counts.tolist()) for q in range(n)]


def test_splits_fill_the_card_and_no_more() -> None:
    assert attention.num_splits(256, 8, 396) == 1
    assert attention.num_splits(8, 8, 396) == 6
    assert attention.num_splits(1, 2, 10**6) == attention.MAX_SPLITS


@BRIEF
@given(
    seed=SEEDS,
    tokens=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (6, 3)]),
    dim=st.sampled_from([32, 64, 80, 96, 128]),
    norm=st.booleans(),
    dtype=DTYPES,
)
def test_rope_store(
    seed: int, tokens: int, heads: tuple[int, int], dim: int, norm: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    num, kv_heads = heads
    qkv = torch.randn(tokens, (num + 2 * kv_heads) * dim).to(dtype)
    weights = [torch.rand(dim).to(dtype) + 0.5 if norm else None for _ in range(2)]
    turn = RotaryEmbedding(dim, 200, 1e4, 1.0).at(torch.randint(200, (tokens,)))
    cos, sin = (t.to(dtype) for t in turn)
    slots = torch.randperm(5 * 16)[:tokens]
    caches = [torch.full((5, kv_heads, 16, dim), NAN, dtype=dtype) for _ in range(4)]
    found = store.rope_store(qkv, *weights, 1e-6, cos, sin, slots, *caches[:2])
    wanted = store.reference(qkv, *weights, 1e-6, cos, sin, slots, *caches[2:])
    close(found, wanted)
    for cache, expected in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(cache.isnan(), expected.isnan())  # nothing else was written
        close(cache.nan_to_num(), expected.nan_to_num())


@BRIEF
@given(
    seed=SEEDS, rows=st.integers(1, 4), size=st.integers(2, 300), add=st.booleans(), dtype=DTYPES
)
def test_add_rms_norm(seed: int, rows: int, size: int, add: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    x, residual = torch.randn(rows, size).to(dtype), torch.randn(rows, size).to(dtype)
    weight = torch.rand(size).to(dtype)
    given_residual = residual if add else None
    found = pointwise.add_rms_norm(x, given_residual, weight, 1e-6)
    wanted = pointwise.add_rms_norm_reference(x, given_residual, weight, 1e-6)
    close(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@BRIEF
@given(seed=SEEDS, rows=st.integers(1, 3), size=st.integers(1, 2100), dtype=DTYPES)
def test_silu_and_mul(seed: int, rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    x = (3 * torch.randn(rows, 2 * size)).to(dtype)
    close(pointwise.silu_and_mul(x), pointwise.silu_and_mul_reference(x))


@BRIEF
@given(seed=SEEDS, pairs=st.integers(1, 4), block=st.sampled_from([(2, 16, 8), (3, 16, 80)]))
def test_copy_blocks(seed: int, pairs: int, block: tuple[int, int, int]) -> None:
    """Blocks that are read and written in the same call too: every read comes first."""
    torch.manual_seed(seed)
    cache = torch.randn(4, 6, *block)
    wanted = cache.clone()
    source, target = torch.randint(6, (pairs,)), torch.randperm(6)[:pairs]
    blocks.copy_blocks(cache, source, target)
    blocks.reference(wanted, source, target)
    assert torch.equal(cache, wanted)


def sampling_batch(rows: int, generator: torch.Generator) -> SamplingBatch:
    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

    return SamplingBatch(
        temperature=pick(0.0, 0.6, 1.0, 2.0),
        top_k=pick(0, 0, 1, 5, 50).long(),
        top_p=pick(1.0, 1.0, 0.95, 0.5, 1e-6),
        min_p=pick(0.0, 0.0, 0.1, 1.0),
        seeds=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        positions=torch.randint(1, 10_000, (rows,), generator=generator),
        all_greedy=False,
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
    )


@settings(BRIEF, max_examples=6)
@given(seed=SEEDS, size=st.sampled_from([40, 2048, 2049]), dtype=DTYPES)
def test_sample(seed: int, size: int, dtype: torch.dtype) -> None:
    """The tokens are the reference's: same filters, same random numbers, same draw."""
    generator = torch.Generator().manual_seed(seed)
    batch = sampling_batch(4, generator)
    # No two logits alike, in float16 neither: of equal ones at an edge the two keep different ones.
    logits = (torch.randperm(size, generator=generator) / 100 - 10)[None].repeat(4, 1).to(dtype)
    assert len(logits[0].unique()) == size or dtype == torch.float16
    if dtype == torch.float16:
        batch.top_k.zero_()
        batch.top_p.fill_(1.0)
    found = sampling.sample(logits, batch)
    assert found.tolist() == sampler.sample(logits.float(), batch).tolist()


def test_sample_gives_tokens_of_the_vocabulary_whatever_comes() -> None:
    """A padding row's logits are made of the null block: NaN perhaps."""
    batch = sampling_batch(8, torch.Generator().manual_seed(1))
    found = sampling.sample(torch.full((8, 300), NAN), batch)
    assert all(0 <= token < 300 for token in found.tolist())


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    num = 400
    row = torch.ones(num)
    batch = SamplingBatch(
        row, torch.zeros(num).long(), row, row * 0, torch.arange(num), torch.arange(num) * 3,
        all_greedy=False, any_top_k=False, any_top_p=False, any_min_p=False,
    )  # fmt: skip
    tokens = sampling.sample(probs.log().expand(num, -1).contiguous(), batch)
    counts = torch.bincount(tokens, minlength=5)
    assert counts[4] == 0
    expected = probs[:4] * num
    chi_squared = float(((counts[:4] - expected) ** 2 / expected).sum())
    assert chi_squared < 16.3  # 3 degrees of freedom: one in a thousand is above


QUESTIONS = {
    "What is 2 + 3?": "2 + 3 = 5",
    "What is 4 + 4?": "4 + 4 = 8",
    "What is 1 + 6?": "1 + 6 = 7",
    "What is 5 + 2?": "5 + 2 = 7",
    "What is 3 + 3?": "3 + 3 = 6",
}


def test_the_engine_answers_by_the_kernels() -> None:
    """The whole engine on the Triton backend: prefill, decode and every fused kernel."""
    llm = LLM(dtype="float32", device="cpu", attention_backend="triton", max_model_len=64)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    answers = [out.outputs[0].text for out in llm.chat(chats, use_tqdm=False)]
    assert answers == list(QUESTIONS.values())
