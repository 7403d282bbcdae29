"""Ragged batches for the attention of a CPU."""

from dataclasses import replace
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import torch
from checkpoints import model_config
from hypothesis import strategies as st
from references import plain_attention

from nanovllm.backends.cpu.attention import NumbaAttention
from nanovllm.backends.cpu.kernels.attention import KEYS
from nanovllm.models.attention import PlainAttention
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.fp8 import Scales, to_fp8

NAN = float("nan")


BACKENDS = [PlainAttention, NumbaAttention]
heads_strategy = st.sampled_from([(4, 2), (8, 1), (3, 3), (6, 2)])


def make(
    make_backend: type[PlainAttention] | type[NumbaAttention],
    heads: tuple[int, int],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    dim: int = 16,
    scales: Scales | None = None,
    window: int = 0,
) -> PlainAttention | NumbaAttention:
    sizes = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True))
    config = replace(model_config("llama", **sizes, head_dim=dim), windows=(window,))
    arguments = config, num_blocks, block_size, dtype, torch.device("cpu")
    return make_backend(*arguments, scales and [scales])


def store(backend: Any, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, heads: int) -> None:
    """Store k and v [n, K, D] in the slots [n], without norms and rotation."""
    batch: Any = SimpleNamespace(slot_mapping=slots)
    if type(backend) is PlainAttention:
        backend.store(0, k, v, batch)
        return
    batch.attention_metadata = SimpleNamespace(slot_mapping=slots.numpy())
    ones = torch.ones(len(k), 1, k.shape[2], dtype=k.dtype)  # the cosine of no rotation
    qkv = torch.cat((k.new_zeros(len(k), heads, k.shape[2]), k, v), dim=1).flatten(1)
    backend.norm_rope_store(0, qkv, None, (ones, ones - 1), batch)


def compare(
    make_backend: type[PlainAttention] | type[NumbaAttention],
    lengths: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    seed: int,
    shared: dict[int, list[int]] | None = None,
    dtype: torch.dtype = torch.float32,
    dim: int = 16,
    scales: Scales | None = None,
    window: int = 0,
) -> Any:
    """Any mix of (query length, tokens before it) against the reference, and what was prepared.

    NaN in the null block and all unwritten slots. `shared`: blocks -> the sequences that share so
    many leading ones. Those of query length 1 at the end decode. With `scales` the cache is in fp8,
    and the reference attends to keys and values as they are rounded, the new ones too.
    """
    torch.manual_seed(seed)
    num_heads, kv_heads = heads
    contexts = [query + past for query, past in lengths]
    needed = [-(-c // block_size) for c in contexts]
    backend = make(make_backend, heads, sum(needed) + 4, block_size, dtype, dim, scales, window)
    k_scale, v_scale = scales or (1.0, 1.0)
    backend.cache.fill_(NAN)
    blocks = (torch.randperm(sum(needed) + 3) + 1).tolist()  # any physical order; never block 0
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    ks, vs, slots, positions = [], [], [], []
    for i, ((query, past), context, n) in enumerate(zip(lengths, contexts, needed, strict=True)):
        own = [blocks.pop() for _ in range(n)]
        at = torch.arange(context)
        ks.append(torch.randn(context, kv_heads, dim).to(dtype))
        vs.append(torch.randn(context, kv_heads, dim).to(dtype))
        for number, members in (shared or {}).items():
            if i in members[1:]:
                first, common = members[0], number * block_size
                own[:number] = tables[first, :number].tolist()
                ks[i][:common], vs[i][:common] = ks[first][:common], vs[first][:common]
        tables[i, :n] = torch.tensor(own)
        slot = torch.tensor(own)[at // block_size] * block_size + at % block_size
        # NaN before the block or segment of the first key that a query sees: it is never read.
        size = KEYS if make_backend is NumbaAttention else block_size
        first = max(0, past + 1 - window) // size * size if window and not shared else 0
        k, v = (torch.cat((x[:first] * NAN, x[first:past])) for x in (ks[-1], vs[-1]))
        store(backend, k, v, slot[:past], num_heads)
        slots.append(slot[past:])
        positions.append(at[past:])
    queries = torch.tensor([query for query, _ in lengths])
    total = int(queries.sum())
    batch = ForwardBatch(
        input_ids=torch.zeros(total, dtype=torch.int64),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        query_start_loc=torch.cat((torch.zeros(1, dtype=torch.int64), queries.cumsum(0))).int(),
        context_lens=torch.tensor(contexts),
        block_tables=tables,
        query_lens=queries.numpy(),
        num_decodes=len(list(takewhile(lambda item: item[0] == 1, reversed(lengths)))),
    )
    q = torch.randn(total, num_heads, dim).to(dtype)
    k_new = torch.cat([k[past:] for k, (_, past) in zip(ks, lengths, strict=True)])
    v_new = torch.cat([v[past:] for v, (_, past) in zip(vs, lengths, strict=True)])
    backend.prepare(batch)
    store(backend, k_new, v_new, batch.slot_mapping, num_heads)
    qkv = q
    if make_backend is NumbaAttention:  # q is scaled as `norm_rope_store` does it
        qkv = torch.cat(((q.float() * k_scale).to(dtype), k_new, v_new), dim=1)
    got = backend.attend(0, qkv, batch).view(q.shape)
    start, tolerance = 0, {"atol": 0.01, "rtol": 0.016}
    if dtype == torch.float32:
        tolerance = {"atol": 2e-5, "rtol": 1e-5}
    for (query, _), k, v in zip(lengths, ks, vs, strict=True):
        if scales is not None:
            k, v = k_scale * to_fp8(k, k_scale).float(), v_scale * to_fp8(v, v_scale).float()
        want = plain_attention(q[start : start + query].float(), k.float(), v.float(), window)
        torch.testing.assert_close(got[start : start + query], want.to(dtype), **tolerance)
        start += query
    return batch.attention_metadata
