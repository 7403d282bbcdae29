"""Paged attention on a GPU, by the Triton kernels in gpu/kernels/."""

import torch
from torch import Tensor

from nanovllm.batch import ForwardBatch
from nanovllm.gpu.kernels import attention, store
from nanovllm.gpu.kernels.configs import GpuInfo, decode_tile, prefill_tile
from nanovllm.models.attention import PlainAttention
from nanovllm.models.config import ModelConfig
from nanovllm.models.layers import Norms, Rope


class TritonAttention(PlainAttention):
    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, num_blocks, block_size, dtype, device)
        self.gpu = GpuInfo.of(device)
        self.decode_tile = decode_tile(self.gpu, config.head_dim, dtype)
        self.prefill_tile = prefill_tile(self.gpu, config.head_dim, dtype)
        self.group_size = config.num_heads // config.num_kv_heads
        if self.group_size > (limit := self.decode_tile.num_rows):
            raise ValueError(
                f"attention_backend='triton' supports at most {limit} query heads per KV head, and "
                f"the model has {self.group_size}; use attention_backend='sdpa'"
            )
        self.num_kv_heads, self.eps = config.num_kv_heads, config.rms_norm_eps

    def prepare(self, batch: ForwardBatch) -> None:
        """Compute the tiles of the chunks' queries once for all layers."""
        chunks = len(batch.context_lens) - batch.num_decodes
        if chunks:
            tokens = len(batch.input_ids) - batch.num_decodes
            queries = self.prefill_tile.num_rows // self.group_size
            starts = batch.query_start_loc[: chunks + 1]
            batch.attention = attention.query_tiles(starts, tokens, queries)

    def norm_rope_store(
        self, layer: int, qkv: Tensor, norms: Norms, rope: Rope, batch: ForwardBatch
    ) -> Tensor:
        cache = (batch.slot_mapping, *self.cache[layer])
        q_norm, k_norm = norms or (None, None)
        return store.norm_rope_store(qkv, q_norm, k_norm, self.eps, *rope, *cache)

    def attend(self, layer: int, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Attention of q [T, H, D] -> [T, H * D].

        Decodes have their own launch: in a prefill tile a single query would leave most rows
        unused, and one program would have to read its whole context.
        """
        k_cache, v_cache = self.cache[layer]
        lens, tables = batch.context_lens, batch.block_tables
        out = torch.empty_like(q)
        decodes = batch.num_decodes
        chunks, tokens = len(lens) - decodes, len(q) - decodes
        if chunks:
            starts = batch.query_start_loc[: chunks + 1]
            chunk_args = (batch.attention, starts, lens[:chunks], tables, self.prefill_tile)
            attention.attend(q[:tokens], k_cache, v_cache, *chunk_args, out[:tokens])
        if decodes:
            programs = self.decode_tile.programs_per_sm * self.gpu.num_sms
            splits = attention.num_splits(decodes, self.num_kv_heads, programs)
            decode_args = (lens[chunks:], tables[chunks:], self.decode_tile, splits)
            attention.attend_decode(q[tokens:], k_cache, v_cache, *decode_args, out[tokens:])
        return out.flatten(1)
