"""The SDPA backend: against plain attention over contiguous tensors, and never reading too much."""

import pytest
import torch
from conftest import make_checkpoint, random_llm
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.attention.sdpa import MAX_PADDING, SdpaAttention
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


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 70)), min_size=1, max_size=9),
    block_size=st.sampled_from([1, 2, 16]),
    heads=st.sampled_from([(4, 2), (8, 1), (3, 3)]),
    seed=st.integers(0, 1000),
)
def test_ragged_batch(
    lengths: list[tuple[int, int]], block_size: int, heads: tuple[int, int], seed: int
) -> None:
    """Any mix of (query length, tokens before it); NaN in the null block and all unwritten slots."""
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
    backend.k_cache.fill_(NAN)
    backend.v_cache.fill_(NAN)
    blocks = (torch.randperm(sum(needed) + 3) + 1).tolist()  # any physical order; never block 0
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    ks, vs, slots, positions = [], [], [], []
    for i, ((query, past), context, n) in enumerate(zip(lengths, contexts, needed, strict=True)):
        own = [blocks.pop() for _ in range(n)]
        tables[i, :n] = torch.tensor(own)
        at = torch.arange(context)
        slot = torch.tensor(own)[at // block_size] * block_size + at % block_size
        ks.append(torch.randn(context, kv_heads, 8))
        vs.append(torch.randn(context, kv_heads, 8))
        backend.k_cache[0, slot[:past]] = ks[-1][:past]
        backend.v_cache[0, slot[:past]] = vs[-1][:past]
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
    backend.prepare(batch)
    backend.store(0, k_new, v_new, batch)
    got = backend.attend(0, q, k_new, v_new, batch)
    start = 0
    for (query, _), k, v in zip(lengths, ks, vs, strict=True):
        want = plain_attention(q[start : start + query], k, v)
        torch.testing.assert_close(got[start : start + query], want, atol=2e-5, rtol=1e-5)
        start += query


def test_decodes_are_few_calls() -> None:
    """A decode step of many sequences makes few groups, each padded by little."""
    backend = SdpaAttention(config(2, 1, 8), 2, 16, torch.float32, torch.device("cpu"))
    contexts = torch.randint(1, 1000, (256,), generator=torch.Generator().manual_seed(0)).int()
    batch = ForwardBatch(
        input_ids=torch.zeros(256, dtype=torch.int64),
        positions=contexts.long() - 1,
        slots=torch.arange(256),
        query_start=torch.arange(257).int(),
        context_lens=contexts,
        block_tables=torch.ones(256, 64, dtype=torch.int32),
        logit_rows=torch.arange(256),
    )
    backend.prepare(batch)
    groups = batch.attention
    assert sum(len(g.tokens) for g in groups) == 256
    read = sum(len(g.slots) if g.slots is not None else len(g.tokens) for g in groups)
    assert len(groups) < 40
    assert read <= MAX_PADDING * int(contexts.sum())


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}, {"kvcache_block_size": 3}])
def test_nan_in_what_nobody_wrote(tmp_path, options: dict) -> None:
    """The whole engine: a cache full of NaN changes nothing."""
    make_checkpoint(tmp_path)
    prompts = [[1 + (7 * i + n) % 150 for i in range(n)] for n in (1, 5, 16, 31, 32)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers = []
    for poison in (0.0, NAN):
        llm = random_llm(tmp_path, **options)
        llm.engine.runner.attention.k_cache.fill_(poison)
        llm.engine.runner.attention.v_cache.fill_(poison)
        answers.append([o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)])
    assert answers[0] == answers[1]
