"""Paged attention on a GPU with the Triton kernels in backends/gpu/kernels/."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.backends.gpu.kernels import attention, store
from nanovllm.backends.gpu.kernels.configs import GpuInfo, decode_tile, prefill_tile
from nanovllm.models.attention import PlainAttention
from nanovllm.models.batch import ForwardBatch, longest_first
from nanovllm.models.fp8 import FP8
from nanovllm.models.layers import Norms, Rope
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.transfers import to_device

# Steps of at most this many tokens share memory for q and the results of attention.
SHARED_TOKENS = 512


class StepLaunches(NamedTuple):
    """The launches of a step in each layer. All layers share the memory of q and the results."""

    q: Tensor  # [T, H, D], also in the launches
    out: Tensor  # [T, H, D]
    launches: list[tuple[Any, ...]]  # (function, its q, arguments that are the same in all layers)


class TritonAttention(PlainAttention):
    def __init__(self, config: ModelConfig, *arguments: Any) -> None:
        super().__init__(config, *arguments)
        device = self.cache.device
        is_fp8 = self.cache.dtype == FP8
        self.layers = [(k, v) for k, v in self.cache]  # indexing the cache takes 10 us
        self.gpu = GpuInfo.of(device)
        self.decode_tile = decode_tile(self.gpu, config.head_dim, self.dtype, is_fp8)
        self.prefill_tile = prefill_tile(self.gpu, config.head_dim, self.dtype)
        self.group_size = config.num_heads // config.num_kv_heads
        if self.group_size > (limit := self.decode_tile.num_rows):
            raise ValueError(
                f"attention_backend='triton' supports at most {limit} query heads per KV head, and "
                f"the model has {self.group_size}; use attention_backend='sdpa'"
            )
        self.num_kv_heads = config.num_kv_heads
        # All layers, and all steps of at most so many tokens, share this memory for q and results.
        shape = 2, SHARED_TOKENS, config.num_heads, config.head_dim
        self.shared = torch.empty(shape, dtype=self.dtype, device=device)

    def memory(self, num_tokens: int) -> Tensor:
        """Return memory [2, T, H, D] for q and the results of attention of a step."""
        if num_tokens <= SHARED_TOKENS:
            return self.shared[:, :num_tokens]
        return self.shared.new_empty((2, num_tokens, *self.shared.shape[2:]))

    def prepare(self, batch: ForwardBatch) -> None:
        """Set the launches of all layers, one for chunks and one for decodes."""
        q, out = self.memory(len(batch.input_ids))
        launches: list[tuple[Any, ...]] = []
        lens = batch.context_lens
        tables = batch.block_tables
        num_chunks = len(lens) - batch.num_decodes
        chunk_tokens = len(batch.input_ids) - batch.num_decodes
        batch.attention_metadata = StepLaunches(q, out, launches)
        if num_chunks:
            tile = self.prefill_tile
            starts = batch.query_start_loc[: num_chunks + 1]
            queries = tile.num_rows // self.group_size
            tiles = attention.query_tiles(batch.query_lens[:num_chunks], queries)
            chunk_args = (to_device(tiles, lens.device), starts, lens[:num_chunks], tables, tile)
            launches.append((attention.attend, q[:chunk_tokens], *chunk_args, out[:chunk_tokens]))
        if batch.num_decodes:
            tile = self.decode_tile
            lens = lens[num_chunks:]
            tables = tables[num_chunks:]
            programs = tile.programs_per_sm * self.gpu.num_sms
            splits = attention.num_splits(batch.num_decodes, self.num_kv_heads, programs)
            order = batch.order
            if order is None:
                assert batch.host_lens is not None
                order = to_device(longest_first(batch.host_lens[num_chunks:]), lens.device)
            q = q[chunk_tokens:]
            out = out[chunk_tokens:]
            args = order, lens, tables, tile, splits
            launches.append((attention.attend_decode, q, *args, out))

    def norm_rope_store(
        self, layer: int, qkv: Tensor, norms: Norms, rope: Rope, batch: ForwardBatch
    ) -> Tensor:
        q_norm, k_norm = norms or (None, None)
        cache = (batch.slot_mapping, *self.layers[layer])
        scales = self.scales[layer]
        q: Tensor = batch.attention_metadata.q
        store.norm_rope_store(qkv, q_norm, k_norm, self.eps, *rope, *cache, *scales, q)
        return q

    def attend(self, layer: int, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute attention of q, the result of `norm_rope_store` -> [T, H * D].

        Decodes have a separate launch: in a prefill tile a single query would leave most rows
        unused, and one program would have to read its whole context.
        """
        step: StepLaunches = batch.attention_metadata
        for attend, queries, *args in step.launches:
            attend(queries, *self.layers[layer], *args, *self.scales[layer], self.windows[layer])
        return step.out.flatten(1)


class InvariantAttention(TritonAttention):
    """The result for a query has the same bits in any batch, in a chunk and as a decode.

    The kernel of chunks computes decodes too, because a token that was decoded is in a chunk after
    a preemption, and two kernels round differently. Contexts are not split.
    """

    def prepare(self, batch: ForwardBatch) -> None:
        q, out = self.memory(len(batch.input_ids))
        starts = batch.query_start_loc
        lens = batch.context_lens
        tile = self.prefill_tile
        if batch.order is None:
            queries = tile.num_rows // self.group_size
            tiles = to_device(attention.query_tiles(batch.query_lens, queries), lens.device)
        else:  # decodes, maybe in a capture, which may not read from the host
            tiles = F.pad(starts[:-1, None], (0, 1))
        attend = partial(attention.attend, loops=1)
        launch = (attend, q, tiles, starts, lens, batch.block_tables, tile, out)
        batch.attention_metadata = StepLaunches(q, out, [launch])


class PlainStoreAttention(TritonAttention):
    """The same with norms, rotary embedding and store in plain torch."""

    def norm_rope_store(
        self, layer: int, qkv: Tensor, norms: Norms, rope: Rope, batch: ForwardBatch
    ) -> Tensor:
        q: Tensor = batch.attention_metadata.q
        return q.copy_(PlainAttention.norm_rope_store(self, layer, qkv, norms, rope, batch))
