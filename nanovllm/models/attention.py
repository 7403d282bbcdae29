"""Paged attention in plain torch: it runs on every device and is the reference for every kernel.

PlainAttention owns the KV cache, [layers, 2, blocks, K, B, D]: K before V, and the slots of one KV
head of a block side by side, so that a head reads a block in one piece. A slot that was never
written may hold anything, including NaN, and is never read.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.batch import ForwardBatch, to_device
from nanovllm.models.config import ModelConfig


class Gathered(NamedTuple):
    """One sequence of the step: its queries, and where its keys and values are in the cache."""

    tokens: slice  # Q of the step's tokens
    block: Tensor  # [L] int64
    offset: Tensor  # [L] int64, within the block
    mask: Tensor | None  # [Q, L] bool, true where a query attends to a key; None: all, or is_causal
    is_causal: bool  # query i attends to the keys 0 to i


class PlainAttention:
    key_padding = 1  # keys are padded to a multiple of this, with keys that no query attends to

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_blocks` includes the null block. The cache is allocated and not cleared."""
        heads, dim = config.num_kv_heads, config.head_dim
        shape = (config.num_layers, 2, num_blocks, heads, block_size, dim)
        self.cache = self.allocate(shape, dtype, device)
        self.block_size = block_size

    @staticmethod
    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def prepare(self, batch: ForwardBatch) -> None:
        batch.attention = [self.gather(batch, i) for i in range(len(batch.context_lens))]

    def gather(self, batch: ForwardBatch, i: int) -> Gathered:
        """Return where the tokens and the context of sequence `i` of the batch are."""
        start, end = batch.query_start_loc[i : i + 2].tolist()
        context_len, num = int(batch.context_lens[i]), end - start
        padded = -(-context_len // self.key_padding) * self.key_padding
        key_positions = torch.arange(padded, device=batch.block_tables.device)
        # Padding repeats position 0, because an unwritten slot may hold NaN.
        readable = torch.where(key_positions < context_len, key_positions, 0)
        block = batch.block_tables[i, readable // self.block_size].long()
        is_causal, mask = num == context_len, None
        if not is_causal:  # the queries are the last `num` positions of the context
            query_positions = torch.arange(context_len - num, context_len, device=block.device)
            mask = key_positions <= query_positions[:, None]
        return Gathered(slice(start, end), block, readable % self.block_size, mask, is_causal)

    def store(self, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        block, offset = batch.slot_mapping // self.block_size, batch.slot_mapping % self.block_size
        k_cache, v_cache = self.cache[layer]
        k_cache[block, :, offset], v_cache[block, :, offset] = k, v

    def attend(self, layer: int, q: Tensor, batch: ForwardBatch) -> Tensor:
        out = torch.empty_like(q)
        self.attend_gathered(layer, q, batch.attention, out)
        return out.flatten(1)

    def attend_gathered(
        self, layer: int, q: Tensor, sequences: list[Gathered], out: Tensor
    ) -> None:
        """Compute the rows of these sequences in out [T, H, D] from q [T, H, D], one by one."""
        for seq in sequences:
            # [L, 2, K, D] -> [1, K, L, D] each
            kv = self.cache[layer][:, seq.block, :, seq.offset]
            k, v = kv.permute(1, 2, 0, 3).unsqueeze(1)
            queries = q[seq.tokens].transpose(0, 1)[None]  # [1, H, Q, D]
            attended = F.scaled_dot_product_attention(
                queries, k, v, seq.mask, is_causal=seq.is_causal, enable_gqa=True
            )
            out[seq.tokens] = attended[0].transpose(0, 1)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        source, target = to_device(np.array(copies).T.copy(), self.cache.device)
        self.cache[:, :, target] = self.cache[:, :, source]  # the right side is a copy
