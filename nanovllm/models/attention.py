"""Paged attention in plain torch. It runs on every device and is the reference for every kernel.

PlainAttention owns the KV cache [layers, 2, blocks, K, B, D]: keys, then values, of K KV heads, in
B slots per block. The slots of one head in a block are contiguous. An unwritten slot may contain
anything, including NaN, and never affects a result. models/fp8.py describes the fp8 cache.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.models.batch import ForwardBatch, to_device
from nanovllm.models.config import ModelConfig
from nanovllm.models.fp8 import FP8, Scales, to_fp8


class Gathered(NamedTuple):
    """The queries of one sequence of the step, and the location of its keys and values."""

    tokens: slice  # its Q tokens among the tokens of the step
    rows: Tensor  # the blocks of its context, as indices from `block_rows`
    context_len: int
    num_keys: int  # L: context_len and padding; no query attends to the padding
    mask: Tensor | None  # [Q, L] bool, true if a query attends to a key; None if `is_causal`
    is_causal: bool  # query i attends to keys 0 to i


class PlainAttention:
    key_padding = 1  # the number of keys is padded to a multiple of this

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        fp8_scales: list[Scales] | None = None,
    ) -> None:
        """Allocate an uninitialized cache. `num_blocks` includes the null block. q, k and v have
        `dtype`. The cache has it too, or is in fp8 if the scales of each layer are given."""
        heads, dim = config.num_kv_heads, config.head_dim
        shape = (config.num_layers, 2, num_blocks, heads, block_size, dim)
        self.cache = self.allocate(shape, FP8 if fp8_scales else dtype, device)
        self.block_size, self.dtype, self.fp8_scales = block_size, dtype, fp8_scales

    @staticmethod
    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def prepare(self, batch: ForwardBatch) -> None:
        batch.attention_metadata = [self.gather(batch, i) for i in range(len(batch.context_lens))]

    def gather(self, batch: ForwardBatch, i: int) -> Gathered:
        """Locate the tokens of sequence `i` in the batch, and its context in the cache."""
        start, end = batch.query_start_loc[i : i + 2].tolist()
        context_len, num = int(batch.context_lens[i]), end - start
        num_keys = -(-context_len // self.key_padding) * self.key_padding
        device = batch.block_tables.device
        # Padding can exceed the block table. It repeats the last block and is not attended to.
        index = torch.arange(-(-num_keys // self.block_size), device=device)
        blocks = batch.block_tables[i, index.clamp(max=(context_len - 1) // self.block_size)]
        is_causal, mask = num == context_len, None
        if not is_causal:  # the queries have the last `num` positions of the context
            query_positions = torch.arange(context_len - num, context_len, device=device)
            mask = torch.arange(num_keys, device=device) <= query_positions[:, None]
        rows = self.block_rows(blocks)
        return Gathered(slice(start, end), rows, context_len, num_keys, mask, is_causal)

    def block_rows(self, blocks: Tensor) -> Tensor:
        """Return indices [2 * K * n] of `blocks` [n] in a layer as [2 * num_blocks * K, B * D]."""
        _, _, num_blocks, kv_heads, *_ = self.cache.shape
        k_and_v = torch.arange(2, device=blocks.device)[:, None, None] * num_blocks
        heads = torch.arange(kv_heads, device=blocks.device)[:, None]
        return ((k_and_v + blocks) * kv_heads + heads).flatten()

    def read_blocks(self, layer: int, rows: Tensor) -> Tensor:
        """Copy the blocks at `rows` -> [2, K, n * B, D]. The fp8 scales are not applied."""
        *_, kv_heads, block_size, dim = self.cache.shape
        blocks = self.cache[layer].view(-1, block_size * dim).index_select(0, rows)
        return blocks.view(2, kv_heads, -1, dim).to(self.dtype)

    def store(self, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        block, offset = batch.slot_mapping // self.block_size, batch.slot_mapping % self.block_size
        k_cache, v_cache = self.cache[layer]
        if self.fp8_scales:
            k, v = map(to_fp8, (k, v), self.fp8_scales[layer])
        k_cache[block, :, offset], v_cache[block, :, offset] = k, v

    def attend(self, layer: int, q: Tensor, batch: ForwardBatch) -> Tensor:
        k_scale, v_scale = self.fp8_scales[layer] if self.fp8_scales else (1.0, 1.0)
        out = torch.empty_like(q)
        self.attend_gathered(layer, q * k_scale, batch.attention_metadata, out)
        return out.flatten(1) * v_scale

    def attend_gathered(
        self, layer: int, q: Tensor, sequences: list[Gathered], out: Tensor
    ) -> None:
        """Compute the attention of each sequence, from q [T, H, D] into out [T, H, D]."""
        for seq in sequences:
            kv = self.read_blocks(layer, seq.rows)[:, :, : seq.num_keys]
            kv[:, :, seq.context_len :] = 0  # a NaN in an unwritten slot would spread
            k, v = kv.unsqueeze(1)  # [1, K, L, D] each
            queries = q[seq.tokens].transpose(0, 1)[None]  # [1, H, Q, D]
            attended = F.scaled_dot_product_attention(
                queries, k, v, seq.mask, is_causal=seq.is_causal, enable_gqa=True
            )
            out[seq.tokens] = attended[0].transpose(0, 1)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        source, target = to_device(np.array(copies).T.copy(), self.cache.device)
        self.cache[:, :, target] = self.cache[:, :, source]  # indexing on the right makes a copy
