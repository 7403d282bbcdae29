"""Paged attention in plain torch. It runs on every device and is the reference for every kernel.

PlainAttention owns the KV cache [layers, 2, blocks, K, B, D]. Index 0 of the second dimension has
the keys, and index 1 the values. K is the number of KV heads, B the number of slots in a block, and
D the size of a head. The slots of one head in a block are contiguous. An unwritten slot may contain
anything, including NaN, and never affects a result. models/fp8.py describes the fp8 cache. T is the
number of tokens of the step, and H the number of query heads.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.models.batch import ForwardBatch
from nanovllm.models.fp8 import FP8, Scales, to_fp8
from nanovllm.models.layers import Norms, Rope, rms_norm, rotate
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.transfers import to_device


class PlainAttention:
    layout = "rows of D numbers"  # of a head's slots in a block

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        fp8_scales: list[Scales] | None = None,
    ) -> None:
        """Allocate an uninitialized cache. `num_blocks` includes the null block.

        q, k and v have `dtype`. The cache is in fp8 if the scales of each layer are given, and has
        `dtype` otherwise.
        """
        heads, dim = config.num_kv_heads, config.head_dim
        num_layers = len(config.kv_layers)
        self.windows = [config.windows[i] for i in config.kv_layers]
        shape = (num_layers, 2, num_blocks, heads, block_size, dim)
        self.cache = self.allocate(shape, FP8 if fp8_scales else dtype, device)
        self.block_size = block_size
        self.dtype = dtype
        self.eps = config.rms_norm_eps
        self.qkv_heads = [config.num_heads, heads, heads]
        # The scales are Python floats: a captured launch contains them, and no kernel loads them.
        self.scales = fp8_scales or [(1.0, 1.0)] * num_layers

    @staticmethod
    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def prepare(self, batch: ForwardBatch) -> None:
        """Set the data that layers with the same window share. The runner calls this once per step.

        For each sequence these are: the slice of its Q tokens in the step; its blocks, from the
        first that a query attends to; the number L of tokens in these blocks; and a mask [Q, L],
        true if a query attends to a key. None means that query i attends to keys 0 to i.
        """
        starts = batch.query_start_loc.tolist()
        plans: dict[int, list[Any]] = {window: [] for window in self.windows}
        for window, (i, length) in itertools.product(plans, enumerate(batch.context_lens.tolist())):
            past = length - int(batch.query_lens[i])  # the queries are the last tokens
            seen = window or length  # tokens that a query attends to
            first = max(0, past + 1 - seen) // self.block_size
            blocks = batch.block_tables[i, first : -(-length // self.block_size)]
            first *= self.block_size
            mask = None
            if past or seen < length:
                keys = torch.arange(first, length, device=blocks.device)
                queries = keys[past - first :, None]
                mask = (keys <= queries) & (keys > queries - seen)
            plans[window].append((slice(*starts[i : i + 2]), blocks, length - first, mask))
        batch.attention_metadata = plans

    def read_blocks(self, layer: int, blocks: Tensor) -> Tensor:
        """Copy K and V of `blocks` [n], without the fp8 scales. Returns [2, K, n * B, D]."""
        kv = self.cache[layer].transpose(1, 2)  # [2, K, blocks, B, D]
        # `kv[:, :, blocks]` takes several times as long on a CPU.
        bits = kv.view(torch.uint8) if kv.dtype == FP8 else kv  # a GPU may not select fp8 numbers
        return bits.index_select(2, blocks).view(kv.dtype).flatten(2, 3).to(self.dtype)

    def norm_rope_store(
        self, layer: int, qkv: Tensor, norms: Norms, rope: Rope, batch: ForwardBatch
    ) -> Tensor:
        """Normalize and rotate q and k, and store k and v.

        The shape of `qkv` is [T, (H + 2K) D]. A backend may overwrite it. Returns the argument of
        `attend`, which is q [T, H, D] in this class.
        """
        q, k, v = qkv.unflatten(-1, (sum(self.qkv_heads), -1)).split(self.qkv_heads, dim=1)
        if norms is not None:
            q_norm, k_norm = norms
            q, k = rms_norm(q, q_norm, self.eps), rms_norm(k, k_norm, self.eps)
        q, k = rotate(q, rope), rotate(k, rope)
        self.store(layer, k, v, batch)
        return q

    def store(self, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Write k and v [T, K, D] to the slots of their tokens."""
        block, offset = batch.slot_mapping // self.block_size, batch.slot_mapping % self.block_size
        k_cache, v_cache = self.cache[layer]
        if self.cache.dtype == FP8:
            k, v = map(to_fp8, (k, v), self.scales[layer])
        k_cache[block, :, offset], v_cache[block, :, offset] = k, v

    def attend(self, layer: int, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Return causal attention [T, H * D] of q [T, H, D] over each sequence's context.

        In a layer with a window of W tokens a query attends to the last W of them, itself included.
        """
        k_scale, v_scale = self.scales[layer]
        q = q * k_scale
        out = torch.empty_like(q)
        for tokens, blocks, length, mask in batch.attention_metadata[self.windows[layer]]:
            # The slots after the context may hold NaN, which would spread.
            kv = self.read_blocks(layer, blocks)[:, :, :length]
            k, v = kv.unsqueeze(1)  # [1, K, L, D] each
            queries = q[tokens].transpose(0, 1)[None]  # [1, H, Q, D]
            attended = F.scaled_dot_product_attention(
                queries, k, v, mask, is_causal=mask is None, enable_gqa=True
            )
            out[tokens] = attended[0].transpose(0, 1)
        return out.flatten(1) * v_scale

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target) in all layers. All reads precede all writes."""
        source, target = to_device(np.array(copies).T.copy(), self.cache.device)
        self.cache[:, :, target] = self.cache[:, :, source]  # indexing on the right makes a copy
