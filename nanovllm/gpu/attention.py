"""Paged attention on a GPU, by the Triton kernels in gpu/kernels/."""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.batch import ForwardBatch, to_device
from nanovllm.gpu.kernels import attention, store
from nanovllm.gpu.kernels.configs import GpuInfo, Tile, decode_tile, prefill_tile
from nanovllm.models.attention import PlainAttention
from nanovllm.models.config import ModelConfig
from nanovllm.models.fp8 import Scales
from nanovllm.models.layers import Norms, Rope


class Launches(NamedTuple):
    """Arguments that the launches of all layers share."""

    num_chunk_tokens: int  # the decodes' tokens follow
    chunks: tuple[Tensor, Tensor, Tensor, Tensor, Tile] | None
    decodes: tuple[Tensor, Tensor, Tensor, Tile, int] | None


class TritonAttention(PlainAttention):
    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        fp8_scales: list[Scales] | None = None,
    ) -> None:
        if fp8_scales:
            check_fp8(device)
        super().__init__(config, num_blocks, block_size, dtype, device, fp8_scales)
        # Numbers of the host: a captured launch contains them, and no kernel waits for a load.
        self.scales = fp8_scales or [(1.0, 1.0)] * config.num_layers
        self.layers = [(k, v) for k, v in self.cache]  # indexing the cache takes 10 us
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
        """Compute once for all layers: the tiles of the chunks' queries, and slices of the batch."""
        decodes = batch.num_decodes
        chunks, tokens = len(batch.context_lens) - decodes, len(batch.input_ids) - decodes
        starts, lens, tables = batch.query_start_loc, batch.context_lens, batch.block_tables
        chunk_args = decode_args = None
        if chunks:
            queries = self.prefill_tile.num_rows // self.group_size
            query_tiles = attention.query_tiles(batch.query_lens[:chunks], queries)
            tiles = to_device(query_tiles, lens.device)
            chunk_args = (tiles, starts[: chunks + 1], lens[:chunks], tables, self.prefill_tile)
        if decodes:
            programs = self.decode_tile.programs_per_sm * self.gpu.num_sms
            splits = attention.num_splits(decodes, self.num_kv_heads, programs)
            order = lens[chunks:].argsort(descending=True)  # the longest contexts start first
            decode_args = (order, lens[chunks:], tables[chunks:], self.decode_tile, splits)
        batch.attention = Launches(tokens, chunk_args, decode_args)

    def norm_rope_store(
        self, layer: int, qkv: Tensor, norms: Norms, rope: Rope, batch: ForwardBatch
    ) -> Tensor:
        q_norm, k_norm = norms or (None, None)
        cache = (batch.slot_mapping, *self.layers[layer])
        scales = self.scales[layer]
        return store.norm_rope_store(qkv, q_norm, k_norm, self.eps, *rope, *cache, *scales)

    def attend(self, layer: int, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Attention of q [T, H, D] -> [T, H * D].

        Decodes have their own launch: in a prefill tile a single query would leave most rows
        unused, and one program would have to read its whole context.
        """
        (k, v), scales, out = self.layers[layer], self.scales[layer], torch.empty_like(q)
        shared: Launches = batch.attention
        tokens = shared.num_chunk_tokens
        if shared.chunks is not None:
            attention.attend(q[:tokens], k, v, *shared.chunks, out[:tokens], *scales)
        if shared.decodes is not None:
            attention.attend_decode(q[tokens:], k, v, *shared.decodes, out[tokens:], *scales)
        return out.flatten(1)


def check_fp8(device: torch.device) -> None:
    """Raise ValueError if Triton has no conversions of float8_e4m3fn for the device."""
    if device.type == "cuda" and not torch.version.hip:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise ValueError(
                "kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or higher, and "
                f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}; use "
                "kv_cache_dtype='auto', or attention_backend='sdpa', which is slower"
            )
