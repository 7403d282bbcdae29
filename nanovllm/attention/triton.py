"""Paged attention by the Triton kernels: the GPU's backend.

Owns: the KV cache, [2, layers, blocks, K, block size, D]: K and V. Given: batches. Mutates: the slots
of the tokens it is told to store, nothing else. The kernels, and why they are as they are, stand in
nanovllm.kernels.
"""

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import ModelConfig
from nanovllm.kernels import attention, blocks, store
from nanovllm.kernels.configs import Card, decode_tile, prefill_tile
from nanovllm.runner.batch import ForwardBatch, send


class TritonAttention:
    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_blocks` counts the null block. The cache is allocated, not cleared."""
        shape = (config.num_layers, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self.cache = torch.empty((2, *shape), dtype=dtype, device=device)
        self.card = Card.of(device)
        self.decode = decode_tile(self.card, config.head_dim, dtype)
        self.prefill = prefill_tile(self.card, config.head_dim, dtype)
        self.group = config.num_heads // config.num_kv_heads
        if self.group > self.decode.rows:
            raise ValueError(
                f"attention_backend='triton' takes at most {self.decode.rows} query heads to a KV "
                f"head, the model has {self.group}; use attention_backend='sdpa'"
            )
        self.kv_heads, self.eps = config.num_kv_heads, config.rms_norm_eps

    def prepare(self, batch: ForwardBatch) -> None:
        """The tiles of the chunks' queries; decodes have a launch of their own."""
        tokens, seqs = batch.input_ids.shape[0], batch.context_lens.shape[0]
        if seqs > batch.num_decodes:
            starts = batch.query_start[: seqs - batch.num_decodes + 1]
            queries = self.prefill.rows // self.group
            batch.attention = attention.query_tiles(starts, tokens - batch.num_decodes, queries)

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
        """Chunks first, then decodes: in the tiles of a prompt a lone query would waste its rows, and
        a long context would be one program's work."""
        k_cache, v_cache = self.cache[:, layer]
        q = store.rope_store(qkv, q_norm, k_norm, self.eps, cos, sin, batch.slots, k_cache, v_cache)
        lens, tables = batch.context_lens, batch.block_tables
        out = torch.empty_like(q)
        decodes = batch.num_decodes
        chunks, tokens = len(lens) - decodes, len(q) - decodes
        if chunks:
            attention.attend(
                q[:tokens], k_cache, v_cache, batch.attention, batch.query_start[: chunks + 1],
                lens[:chunks], tables, self.prefill, out[:tokens],
            )  # fmt: skip
        if decodes:
            programs = self.decode.resident * self.card.processors
            splits = attention.num_splits(decodes, self.kv_heads, programs)
            attention.attend_decode(
                q[tokens:], k_cache, v_cache, lens[chunks:], tables[chunks:], self.decode, splits,
                out[tokens:],
            )  # fmt: skip
        return out.flatten(1)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        source, target = send(np.array(copies).T.copy(), self.cache.device)
        blocks.copy_blocks(self.cache.flatten(0, 1), source, target)
