"""The CPU's backend: against plain attention over contiguous tensors, and never reading too much."""

import random
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import make_checkpoint, random_llm
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.attention import decode
from nanovllm.attention.sdpa import MAX_PADDING, SdpaAttention, Step, rectangles
from nanovllm.config import ModelConfig
from nanovllm.runner.batch import ForwardBatch

NAN = float("nan")


def config(heads: int, kv_heads: int, dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=1, hidden_size=1, intermediate_size=1,
        num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rms_norm_eps=0.0,
        rope_theta=1.0, rope_factor=1.0, max_position_embeddings=1, tie_word_embeddings=True,
        attention_bias=False, output_bias=False, qk_norm=False, sliding_window=None, dtype=None,
    )  # fmt: skip


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [Q, H, D] at the end of the context k, v [L, K, D], written out: the reference."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,lhd->hql", q, k) / q.shape[2] ** 0.5
    ahead = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
    return torch.einsum("hql,lhd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v)


def compare(
    lengths: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    seed: int,
    shared: dict[int, list[int]] | None = None,
    in_place: bool = False,
) -> Step:
    """Any mix of (query length, tokens before it) against the reference, and what was prepared.

    NaN in the null block and all unwritten slots. `shared`: blocks -> the sequences that share so
    many leading ones. `in_place`: read K where it lies, however far apart its blocks are.
    """
    torch.manual_seed(seed)
    num_heads, kv_heads = heads
    contexts = [query + past for query, past in lengths]
    needed = [-(-c // block_size) for c in contexts]
    backend = SdpaAttention(
        config(num_heads, kv_heads, 8),
        sum(needed) + 4,
        block_size,
        torch.float32,
        torch.device("cpu"),
    )
    backend.cache.fill_(NAN)
    blocks = (torch.randperm(sum(needed) + 3) + 1).tolist()  # any physical order; never block 0
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    ks, vs, slots, positions = [], [], [], []
    for i, ((query, past), context, n) in enumerate(zip(lengths, contexts, needed, strict=True)):
        own = [blocks.pop() for _ in range(n)]
        at = torch.arange(context)
        ks.append(torch.randn(context, kv_heads, 8))
        vs.append(torch.randn(context, kv_heads, 8))
        for number, members in (shared or {}).items():
            if i in members[1:]:
                first, common = members[0], number * block_size
                own[:number] = tables[first, :number].tolist()
                ks[i][:common], vs[i][:common] = ks[first][:common], vs[first][:common]
        tables[i, :n] = torch.tensor(own)
        slot = torch.tensor(own)[at // block_size] * block_size + at % block_size
        block, offset = slot[:past] // block_size, slot[:past] % block_size
        backend.k_cache[0].transpose(1, 2)[block, offset] = ks[-1][:past]
        backend.v_cache[0].transpose(1, 2)[block, offset] = vs[-1][:past]
        slots.append(slot[past:])
        positions.append(at[past:])
    queries = torch.tensor([query for query, _ in lengths])
    batch = ForwardBatch(
        input_ids=torch.zeros(int(queries.sum()), dtype=torch.int64),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        query_start=torch.cat((torch.zeros(1, dtype=torch.int64), queries.cumsum(0))).int(),
        context_lens=torch.tensor(contexts).int(),
        block_tables=tables,
        logit_rows=queries.cumsum(0) - 1,
    )
    q = torch.randn(int(queries.sum()), num_heads, 8)
    k_new = torch.cat([k[past:] for k, (_, past) in zip(ks, lengths, strict=True)])
    v_new = torch.cat([v[past:] for v, (_, past) in zip(vs, lengths, strict=True)])
    backend.decode.in_place = in_place
    with mock.patch.object(decode, "DENSE", 1e9):
        backend.prepare(batch)
    backend.store(0, torch.cat((k_new, v_new), dim=1), batch)
    got = backend.attend(0, q, k_new, v_new, batch)
    start = 0
    for (query, _), k, v in zip(lengths, ks, vs, strict=True):
        want = plain_attention(q[start : start + query], k, v)
        torch.testing.assert_close(got[start : start + query], want, atol=2e-5, rtol=1e-5)
        start += query
    return batch.attention


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 70)), min_size=1, max_size=9),
    block_size=st.sampled_from([1, 2, 16, 48]),
    heads=st.sampled_from([(4, 2), (8, 1), (3, 3)]),
    seed=st.integers(0, 1000),
)
def test_ragged_batch(
    lengths: list[tuple[int, int]], block_size: int, heads: tuple[int, int], seed: int
) -> None:
    compare(lengths, block_size, heads, seed)


@settings(max_examples=50, deadline=None)
@given(
    pasts=st.lists(st.integers(0, 99), min_size=1, max_size=20),
    block_size=st.sampled_from([1, 2, 16, 48]),
    heads=st.sampled_from([(4, 2), (8, 1), (3, 3)]),
    seed=st.integers(0, 1000),
)
def test_decodes(pasts: list[int], block_size: int, heads: tuple[int, int], seed: int) -> None:
    """One query each; groups cut as if there were many more."""
    with mock.patch.multiple(decode, MAX_SEQS=5, TILE_BYTES=300 * heads[1] * 8 * 4):
        groups = compare([(1, past) for past in pasts], block_size, heads, seed).decodes
    assert sum(len(g.tokens) for g in groups) == len(pasts)
    assert all(len(g.tokens) <= 5 for g in groups)
    groups = compare([(1, past) for past in pasts], block_size, heads, seed, in_place=True).decodes
    assert all(isinstance(g.keys, slice) for g in groups)


@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (3, 3)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_shared_prefixes_are_read_once(block_size: int, heads: tuple[int, int]) -> None:
    """Two families of a common prefix, two that share too little, and others, some not decoding."""
    long, short = 320 // block_size, 192 // block_size
    pasts = [321, 400, 380, 500, 200, 192 + 1, 210, 250, 17, 40, 20, 0]
    lengths = [(1, past) for past in pasts] + [(7, 500), (3, 0)]
    few = -(-16 // block_size)
    shared = {long: [0, 1, 3, 12], short: [4, 5, 7], few: [8, 9]}
    groups = compare(lengths, block_size, heads, 5, shared).decodes
    found = {
        tuple(g.tokens.tolist()): 0 if g.shared_rows is None else len(g.shared_rows) // heads[1]
        for g in groups
    }
    assert found == {(0, 1, 3): long, (4, 5, 7): short, (2, 6, 8, 9, 10, 11): 0}
    groups = compare(lengths, block_size, heads, 5, shared, in_place=True).decodes
    # Of the last group two share blocks, which a tile of one owner cannot express.
    assert [isinstance(g.keys, slice) for g in groups] == [True, True, False]


def test_decodes_are_few_calls() -> None:
    """A decode step of many sequences makes few groups, and reads little more than their KV."""
    backend = SdpaAttention(config(2, 1, 8), 16_385, 16, torch.float32, torch.device("cpu"))
    contexts = torch.randint(1, 1000, (256,), generator=torch.Generator().manual_seed(0)).int()
    batch = ForwardBatch(
        input_ids=torch.zeros(256, dtype=torch.int64),
        positions=contexts.long() - 1,
        slots=torch.arange(256),
        query_start=torch.arange(257).int(),
        context_lens=contexts,
        block_tables=torch.arange(1, 1 + 256 * 64, dtype=torch.int32).view(256, 64),
        logit_rows=torch.arange(256),
    )
    backend.prepare(batch)
    step, total = batch.attention, int(contexts.sum())
    assert not step.groups
    assert sum(len(g.tokens) for g in step.decodes) == 256
    assert len(step.decodes) < 20
    assert sum(len(g.keys) * 16 for g in step.decodes) <= 1.1 * total
    assert sum(len(g.value_rows) for g in step.decodes) == 2 * total  # for two query heads


@pytest.mark.parametrize(("gap", "in_place"), [(0, True), (3, True), (8, False)])
def test_keys_are_read_in_place_where_they_lie_close(gap: int, in_place: bool) -> None:
    """Ten blocks of one sequence, some unused ones, and two of another."""
    backend = SdpaAttention(config(2, 1, 8), 40, 16, torch.float32, torch.device("cpu"))
    backend.decode.in_place = True
    tables = np.zeros((2, 10), np.int32)
    tables[0], tables[1, :2] = range(3, 13), (13 + gap, 14 + gap)
    (found,) = backend.decode.prepare(np.arange(2), np.array([160, 17]), tables)
    assert isinstance(found.keys, slice) == in_place
    if in_place:
        assert found.keys == slice(3, 15 + gap)


@pytest.mark.parametrize("in_place", [False, True])
def test_shapes_of_products_repeat(in_place: bool) -> None:
    """oneDNN makes code for each shape: a batch that grows by a block at each step has few."""
    backend = SdpaAttention(config(2, 1, 8), 300, 16, torch.float32, torch.device("cpu"))
    backend.decode.in_place = in_place
    found = set()
    for blocks in range(1, 300):
        tables = np.arange(300 - blocks, 300)[None]  # as far as the last block there is
        (d,) = backend.decode.prepare(np.arange(1), np.array([16 * blocks]), tables)
        assert isinstance(d.keys, slice) == in_place
        read = len(range(300)[d.keys]) if isinstance(d.keys, slice) else len(d.keys)
        assert blocks <= read <= max(blocks + 1, 1.07 * blocks)
        found.add(len(d.query_rows))
    assert len(found) < 90


def test_prompts_are_few_calls() -> None:
    """Chunks of one length behind contexts of many: rectangles, padded by little."""
    rng = random.Random(0)
    items = sorted((32, 32 + rng.randint(1, 1000), 0, i) for i in range(256))
    groups = rectangles(items)
    assert len(groups) < 40
    read = sum(len(g) * max(context for _, context, *_ in g) for g in groups)
    assert read <= MAX_PADDING * sum(context for _, context, *_ in items)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}, {"kvcache_block_size": 3}])
def test_nan_in_what_nobody_wrote(tmp_path, options: dict) -> None:
    """The whole engine: a cache full of NaN changes nothing."""
    make_checkpoint(tmp_path)
    prompts = [[1 + (7 * i + n) % 150 for i in range(n)] for n in (1, 5, 16, 31, 32)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers = []
    for poison in (0.0, NAN):
        llm = random_llm(tmp_path, **options)
        llm.engine.runner.attention.cache.fill_(poison)
        answers.append([o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)])
    assert answers[0] == answers[1]
