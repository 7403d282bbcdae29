"""Paged attention in plain torch: every oracle, and the CPU's backend where Numba is missing.

Owns: the KV cache, [layers, 2, blocks, K, B, D], K before V: a block holds the slots of one KV head
after those of another, so that a head's keys come out of it in one piece. Given: batches. Mutates:
the slots of the tokens it is told to store, nothing else.

torch's scaled_dot_product_attention wants rectangles where the batch is ragged: `prepare` sorts the
sequences into groups of equal query length and like context length, and finds for each group the rows
to gather; every layer then makes a handful of calls, however many sequences take part. What SDPA must
not see it is never shown: padding positions gather a slot that the sequence did write (its first), so
that a NaN in the null block or in an unwritten slot cannot reach a sum, not even times zero.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.config import ModelConfig
from nanovllm.layers.rotary import norm_and_rotate
from nanovllm.runner.batch import ForwardBatch

MAX_PADDING = 1.15  # a group's contexts are padded by at most this factor
KEYS = 32  # contexts are padded to a multiple: a kernel of torch's takes 750 us for 157 keys, 280 for 160
PAGE = 4096  # bytes
KEPT_BYTES = 64 << 20  # of each scratch memory


@dataclass(slots=True)
class Group:
    """N sequences with Q queries each, contexts padded to L."""

    tokens: Tensor | slice  # [N * Q] int64: their queries among the step's tokens
    queries: int  # Q
    rows: Tensor  # [2 * N * K * L] int64, of a layer's cache as [rows, D]: K, then V
    mask: Tensor | None  # [N, 1, Q, L] bool, true where a query may look; None: the first all along


@dataclass(slots=True)
class Step:
    """What all layers share."""

    rows: Tensor  # [T, 2K] int64, of a layer's cache as [rows, D]: where K and V of a token go
    groups: list[Group]


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
        heads, dim = config.num_kv_heads, config.head_dim
        shape = (config.num_layers, 2, num_blocks, heads, block_size, dim)
        self.cache = empty_pages(shape, dtype, device)
        self.block_size, self.kv_heads, self.dim = block_size, heads, dim
        self.eps = config.rms_norm_eps
        self.scratch = Scratch(dtype, device)

    def rows(self, slots: Tensor) -> Tensor:
        """slots [...] -> [..., 2, K]: of K and V and each KV head, rows of a layer's cache as [rows, D]."""
        _, kinds, blocks, heads, size, _ = self.cache.shape
        kind = torch.arange(kinds, device=slots.device)[:, None] * blocks
        block, offset = (slots // size)[..., None, None], (slots % size)[..., None, None]
        return ((kind + block) * heads + torch.arange(heads, device=slots.device)) * size + offset

    # ---- once a step ----

    def prepare(self, batch: ForwardBatch) -> None:
        rows = self.rows(batch.slots).flatten(1)
        batch.attention = Step(rows, self.groups(batch, np.arange(len(batch.context_lens))))

    def groups(self, batch: ForwardBatch, seqs: np.ndarray) -> list[Group]:
        """Rectangles of these sequences."""
        starts = batch.query_start.cpu().numpy().astype(np.int64)
        contexts = batch.context_lens.cpu().numpy()
        # (query length, context length, first token, sequence), alike ones side by side
        columns = (np.diff(starts)[seqs], contexts[seqs], starts[seqs], seqs)
        items = sorted(zip(*(c.tolist() for c in columns), strict=True))
        return [self._group(batch, alike) for alike in rectangles(items)]

    def _group(self, batch: ForwardBatch, group: list[tuple[int, int, int, int]]) -> Group:
        device = batch.slots.device
        queries, longest = group[0][0], -(-group[-1][1] // KEYS) * KEYS
        whole = queries == group[0][1]
        group.sort(key=lambda g: g[2])  # so that a lone group is the batch itself, in order
        start, stop = group[0][2], group[-1][2] + queries
        tokens: Tensor | slice = slice(start, stop)
        if stop - start != len(group) * queries:  # not side by side
            first = torch.tensor([g[2] for g in group], device=device)
            tokens = (first[:, None] + torch.arange(queries, device=device)).flatten()
        members = torch.tensor([g[3] for g in group], device=device)
        context = batch.context_lens[members].long()[:, None]  # [N, 1]
        at = torch.arange(longest, device=device).expand(len(group), -1)  # [N, L] key positions
        table = batch.block_tables[members].long()
        readable = torch.where(at < context, at, 0)  # padding reads position 0
        block = table.gather(1, readable // self.block_size)
        slots = block * self.block_size + readable % self.block_size
        rows = self.rows(slots).permute(2, 0, 3, 1).flatten()  # from [N, L, 2, K]
        if whole:
            return Group(tokens, queries, rows, None)
        query_at = context - queries + torch.arange(queries, device=device)  # [N, Q] positions
        mask = at[:, None, :] <= query_at[:, :, None]  # [N, Q, L]
        return Group(tokens, queries, rows, mask[:, None])

    # ---- once a layer ----

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        q, k, v = norm_and_rotate(qkv, self.kv_heads, self.dim, q_norm, k_norm, self.eps, cos, sin)
        self.cache[layer].view(-1, self.dim)[batch.attention.rows] = torch.cat((k, v), dim=1)
        out = torch.empty_like(q)
        self.attend_groups(batch.attention.groups, layer, q, out)
        return out.flatten(1)

    def attend_groups(self, groups: list[Group], layer: int, q: Tensor, out: Tensor) -> None:
        """q [T, H, D] -> out [T, H, D], those rows that belong to the groups."""
        cache = self.cache[layer].view(-1, self.dim)
        for group in groups:
            t = group.tokens
            queries = q[t].unflatten(0, (-1, group.queries)).transpose(1, 2)  # [N, H, Q, D]
            found = self.scratch.rows(cache, group.rows)
            keys, values = found.view(2, len(queries), self.kv_heads, -1, self.dim)
            causal = group.mask is None
            found = F.scaled_dot_product_attention(
                queries, keys, values, group.mask, is_causal=causal, enable_gqa=True
            )
            out[t] = found.transpose(1, 2).flatten(0, 1)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        source, target = torch.tensor(copies, device=self.cache.device).T
        self.cache[:, :, target] = self.cache[:, :, source]  # the right side is a copy


class Scratch:
    """Memory that is kept: a new tensor is new pages, which cost more than what goes into them."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=dtype, device=device)

    def take(self, size: int) -> Tensor:
        """[size], whatever it holds; it stands until the next call."""
        if size * self.memory.itemsize > KEPT_BYTES:
            return self.memory.new_empty(size)
        if self.memory.numel() < size:
            most = KEPT_BYTES // self.memory.itemsize
            self.memory = self.memory.new_empty(min(size * 5 // 4, most))
        return self.memory[:size]

    def rows(self, rows: Tensor, index: Tensor) -> Tensor:
        """rows[index]"""
        out = self.take(len(index) * rows.shape[1]).view(-1, rows.shape[1])
        return torch.index_select(rows, 0, index, out=out)


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty, of huge pages where the system has them to give.

    On a CPU a cache gets its pages when they are first written: a new block is hundreds of page
    faults of 5 us if a page is 4 kB. numpy asks Linux for pages of 2 MB, torch does not. It begins
    with a page, so that a row of 64 bytes or more is never spread over one cache line too many.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.empty(size + PAGE, np.uint8))
    start = -memory.data_ptr() % PAGE
    return memory[start : start + size].view(dtype).view(shape)


def rectangles(items: list[tuple[int, int, int, int]]) -> list[list[tuple[int, int, int, int]]]:
    """(query length, context length, ...), sorted -> groups that pad their contexts by little."""
    groups: list[list[tuple[int, int, int, int]]] = []
    filled = 0
    for item in items:
        query, context = item[:2]
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
    return groups
