"""Paged attention by torch's scaled_dot_product_attention: the CPU's backend, and every oracle.

Owns: the KV cache, K and V of [layers, slots, K, D]; slot = block * block_size + offset.
Given: batches. Mutates: the slots of the tokens it is told to store, nothing else.

SDPA wants rectangles, the batch is ragged. `prepare` sorts the sequences into groups of equal query
length and like context length, and finds for each group the slots to gather; every layer then makes
a handful of calls, however many sequences decode. What SDPA must not see it is never shown: padding
positions gather a slot that the sequence did write (its first), so that a NaN in the null block or
in an unwritten slot cannot reach a sum, not even times zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.config import ModelConfig
from nanovllm.layers.rotary import norm_and_rotate
from nanovllm.runner.batch import ForwardBatch

MAX_PADDING = 1.15  # a group's contexts are padded by at most this factor


@dataclass(slots=True)
class Group:
    """N sequences with Q queries each, contexts padded to L."""

    tokens: Tensor  # [N * Q] int64: their queries among the step's tokens
    queries: int  # Q
    slots: Tensor | None  # [N * L] int64; None: no context but the step's own tokens, in order
    mask: (
        Tensor | None
    )  # [N, 1, Q, L] bool, true where a query may look; None: causal, or all equal


class SdpaAttention:
    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_blocks` counts the null block. The cache is allocated, not cleared."""
        shape = (config.num_layers, num_blocks * block_size, config.num_kv_heads, config.head_dim)
        self.k_cache = torch.empty(shape, dtype=dtype, device=device)
        self.v_cache = torch.empty(shape, dtype=dtype, device=device)
        self.block_size = block_size
        self.kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.eps = config.rms_norm_eps

    def prepare(self, batch: ForwardBatch) -> None:
        starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
        # (query length, context length, first token, sequence), alike ones side by side
        order = sorted(
            (end - start, context, start, i)
            for i, (start, end, context) in enumerate(
                zip(starts, starts[1:], contexts, strict=False)
            )
        )
        groups: list[list[tuple[int, int, int, int]]] = []
        filled = 0
        for item in order:
            query, context, _, _ = item
            group = groups[-1] if groups else None
            filled += context  # of the group, with this one
            whole = query == context  # a prompt without a past; such groups stay pure
            alike = group and group[0][0] == query and (query == group[0][1]) == whole
            # Sorted, so this is the longest yet: would it pad those before it too much?
            if group and alike and context * (len(group) + 1) <= MAX_PADDING * filled:
                group.append(item)
            else:
                groups.append([item])
                filled = context
        batch.attention = [self._group(batch, group) for group in groups]

    def _group(self, batch: ForwardBatch, group: list[tuple[int, int, int, int]]) -> Group:
        device = batch.slots.device
        queries, longest = group[0][0], group[-1][1]
        equal = group[0][1] == longest
        group.sort(key=lambda g: g[2])  # so that a lone group is the batch itself, in order
        first = torch.tensor([g[2] for g in group], device=device)
        tokens = (first[:, None] + torch.arange(queries, device=device)).flatten()
        if queries == group[0][1]:
            return Group(tokens, queries, None, None)
        rows = torch.tensor([g[3] for g in group], device=device)
        context = batch.context_lens[rows].long()[:, None]  # [N, 1]
        at = torch.arange(longest, device=device).expand(len(group), -1)  # [N, L] key positions
        table = batch.block_tables[rows].long()
        readable = torch.where(at < context, at, 0)  # padding reads position 0
        block = table.gather(1, readable // self.block_size)
        slots = block * self.block_size + readable % self.block_size
        query_at = context - queries + torch.arange(queries, device=device)  # [N, Q] positions
        mask = at[:, None, :] <= query_at[:, :, None]  # [N, Q, L]
        blind = queries == 1 and equal  # nothing to hide from anyone
        return Group(tokens, queries, slots.flatten(), None if blind else mask[:, None])

    def turn_and_store(
        self,
        layer: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = norm_and_rotate(
            qkv, self.kv_heads, self.head_dim, q_norm, k_norm, self.eps, cos, sin
        )
        self.store(layer, k, v, batch)
        return q, k, v

    def store(self, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        self.k_cache[layer].index_copy_(0, batch.slots, k)
        self.v_cache[layer].index_copy_(0, batch.slots, v)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        source, target = torch.tensor(copies, device=self.k_cache.device).T
        for cache in (self.k_cache, self.v_cache):
            blocks = cache.unflatten(1, (-1, self.block_size))  # [layers, blocks, offset, K, D]
            blocks[:, target] = blocks[:, source]  # the right side is a copy

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        groups: list[Group] = batch.attention
        if len(groups) == 1:
            return self._attend(layer, q, k, v, groups[0])
        out = torch.empty_like(q)
        for group in groups:
            t = group.tokens
            k_own, v_own = (k[t], v[t]) if group.slots is None else (k, v)
            out[t] = self._attend(layer, q[t], k_own, v_own, group)
        return out

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
        """q [N * Q, H, D] -> [N * Q, H, D]."""
        _, heads, dim = q.shape
        kv_heads, queries = k.shape[1], group.queries
        if group.slots is not None:
            k = self.k_cache[layer].index_select(0, group.slots)
            v = self.v_cache[layer].index_select(0, group.slots)
        n = q.shape[0] // queries
        k = k.view(n, -1, kv_heads, dim).transpose(1, 2)  # [N, K, L, D]
        v = v.view(n, -1, kv_heads, dim).transpose(1, 2)
        if queries == 1:
            # The query heads that share a KV head become the rows of one product with it.
            packed = q.view(n, kv_heads, heads // kv_heads, dim)
            out = F.scaled_dot_product_attention(packed, k, v, group.mask)
            return out.reshape(-1, heads, dim)
        q = q.view(n, queries, heads, dim).transpose(1, 2)  # [N, H, Q, D]
        causal = group.mask is None
        out = F.scaled_dot_product_attention(q, k, v, group.mask, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2).reshape(-1, heads, dim)
