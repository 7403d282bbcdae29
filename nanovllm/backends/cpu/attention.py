"""Attention on a CPU: Numba kernels, and torch's attention for prompts except with AVX512-BF16.

With one query per sequence a step does little else than read KV. Leading blocks that sequences
share are read once for all: by the same kernel for a pack of queries, or, without AVX512-BF16, by
torch's flash attention for many queries. The kernel then continues with each sequence's own blocks
and merges both by their log-sum-exp, as flash decoding does (arXiv:2311.01282).

Shapes: T tokens of the step, N sequences of a group, H = K * G query heads that share K KV heads in
groups of G, D head size, B slots of a block, P slots of the shared prefix.
"""

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanovllm.api.log import logger
from nanovllm.backends.cpu import amx, avx512, kernels, packs
from nanovllm.backends.cpu.compile import compile_all
from nanovllm.backends.cpu.linear import PACKED_FOR
from nanovllm.backends.cpu.parallel import run
from nanovllm.backends.cpu.primitives import DTYPE_EXAMPLE
from nanovllm.models.attention import Gathered, PlainAttention
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.config import ModelConfig
from nanovllm.models.fp8 import Scales
from nanovllm.models.layers import Norms, Rope

# Returns (output, log-sum-exp), unlike scaled_dot_product_attention, which calls it.
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# A chunk is treated as decodes if at most this many tokens are outside its shared prefix.
MAX_OWN_TOKENS = 64
# Except with AVX512-BF16: with more queries per KV head than this, torch's flash attention reads a
# prefix faster than packs do: for 960 queries of 512 tokens, 28 layers took 80 ms instead of 240.
FLASH_QUERIES = 128
# A shared prefix is read in a pass of its own if that saves reading at least this many tokens.
MIN_SAVED_TOKENS = 256
PAGE_BYTES = 4096


@dataclass(slots=True)
class Prefix:
    """Blocks that many tokens of the step attend to, read by torch's flash attention."""

    tokens: Any  # [n] int64
    rows: Tensor  # [2 * K * P / B] int64, of a layer's cache as [rows, B * D]: K, then V


@dataclass(slots=True)
class AttentionPlan:
    """What `prepare` computes once for all layers."""

    slot_mapping: Any  # [T] int64
    work: packs.AttentionWork | None  # the kernel's part
    prefixes: list[Prefix]
    # Whole prompts: their tokens, and those of their keys, padded with the first one.
    prompts: list[tuple[slice, Tensor]]
    chunks: list[Gathered]  # other chunks, for PlainAttention


class NumbaAttention(PlainAttention):
    # torch's attention takes 750 us for 157 keys and 280 us for 160.
    key_padding = 32

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        fp8_scales: list[Scales] | None = None,
    ) -> None:
        super().__init__(config, num_blocks, block_size, dtype, device, fp8_scales)
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.group_size, self.eps = self.heads // self.kv_heads, config.rms_norm_eps
        self.examples = DTYPE_EXAMPLE[dtype], DTYPE_EXAMPLE[self.cache.dtype]
        self.scales = fp8_scales or [(1.0, 1.0)] * config.num_layers
        self.shape = (num_blocks, self.kv_heads, block_size, self.dim)
        self.kv_addresses = [(layer[0].data_ptr(), layer[1].data_ptr()) for layer in self.cache]
        # The module whose attend_packs is called. Two of them multiply bfloat16 as it is in the cache.
        self.unit: Any = packs
        if self.cache.dtype is torch.bfloat16 and amx.has_amx():
            if amx.fits_amx(self.group_size, block_size, self.dim):
                self.unit = amx
        elif self.cache.dtype is torch.bfloat16 and avx512.has_avx512_bf16() and self.dim % 32 == 0:
            self.unit = avx512
        elif fp8_scales and dtype is torch.bfloat16 and (amx.has_amx() or avx512.has_avx512_bf16()):
            logger.info("an fp8 KV cache is read without AMX and AVX512-BF16, layer by layer")
        self.code = compile_all(dtype, self.unit, self.cache.dtype)

    @staticmethod
    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate on huge pages where the system has them, aligned to a page.

        A cache gets its pages when they are first written; with pages of 4 kB that is hundreds of
        page faults per block. numpy asks Linux for pages of 2 MB, torch does not. The alignment
        puts rows of 64 bytes and more into as few cache lines as possible.
        """
        size = int(np.prod(shape)) * dtype.itemsize
        memory = torch.from_numpy(np.empty(size + PAGE_BYTES, np.uint8))
        start = -memory.data_ptr() % PAGE_BYTES
        return memory[start : start + size].view(dtype).view(shape)

    # ---- once per step ----

    def prepare(self, batch: ForwardBatch) -> None:
        follow_torch()
        starts = batch.query_start_loc.numpy().astype(np.int64)
        contexts = batch.context_lens.numpy().astype(np.int64)
        tables, queries = batch.block_tables.numpy(), np.diff(starts)
        first_decode = len(queries) - batch.num_decodes
        groups: list[tuple[Any, int]] = []
        chunks = np.arange(first_decode)
        if first_decode:
            groups = self._short_chunks(first_decode, queries, contexts, tables)
            chunks = np.setdiff1d(chunks, [i for members, _ in groups for i in members])
        if batch.num_decodes:
            decodes = slice(first_decode, None)
            for members, shared in shared_prefixes(
                tables[decodes], contexts[decodes], self.block_size
            ):
                groups.append((first_decode + members, shared))
        if self.unit is avx512 and len(chunks):
            groups.append((chunks, 0))  # its kernel is faster than torch's attention
            chunks = chunks[:0]
        step = AttentionPlan(batch.slot_mapping.numpy(), None, [], [], [])
        for i in chunks:
            if queries[i] < contexts[i]:
                step.chunks.append(self.gather(batch, int(i)))
            else:
                keys = np.arange(-(-contexts[i] // self.key_padding) * self.key_padding)
                padded = starts[i] + np.where(keys < contexts[i], keys, 0)
                step.prompts.append((slice(starts[i], starts[i + 1]), torch.from_numpy(padded)))
        if groups:
            self._plan_work(step, groups, starts, queries, contexts, tables)
        batch.attention = step

    def _plan_work(
        self,
        step: AttentionPlan,
        groups: list[tuple[Any, int]],
        starts: Any,
        queries: Any,
        contexts: Any,
        tables: Any,
    ) -> None:
        """Fill in the kernel's work from groups of (sequences, number of shared leading blocks)."""
        size, pack_size = self.block_size, max(1, self.unit.MAX_PACK_ROWS // self.group_size)
        # Steps of few rows are one call (cpu/layers.py), which cannot include flash attention.
        many_rows = sum(int(queries[members].sum()) for members, _ in groups) > PACKED_FOR
        by_torch = many_rows and self.unit is not avx512

        # 1. The shared prefixes: packs of any tokens that attend to the same blocks.
        packed, first_members, lengths = [np.empty((0, pack_size), np.int64)], [], []
        own_sequences, own_starts = [], []
        for members, shared in groups:
            if shared:
                tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in members])
                if by_torch and len(tokens) * self.group_size > FLASH_QUERIES:
                    blocks = torch.from_numpy(tables[members[0], :shared])
                    step.prefixes.append(Prefix(tokens, self.block_rows(blocks)))
                elif pack_size > 1:
                    filled = np.pad(tokens, (0, -len(tokens) % pack_size), constant_values=-1)
                    packed.append(filled.reshape(-1, pack_size))
                    first_members += [members[0]] * len(packed[-1])
                    lengths += [shared] * len(packed[-1])
                else:
                    shared = 0  # one query fills a pack, so there is nothing to save
            own_sequences.append(members)
            own_starts.append(np.full(len(members), shared))
        prefixes = packs.Packs(
            np.concatenate(packed),
            np.repeat(np.array(lengths, np.int64)[:, None] * size, pack_size, axis=1),
            tables[np.array(first_members, np.int64), : max(lengths, default=0)],
        )

        # 2. The rest of each context: packs of consecutive tokens of one sequence.
        seqs, past = np.concatenate(own_sequences), np.concatenate(own_starts)  # blocks of prefixes
        most, pack_index = int(queries[seqs].max()), 0
        pack_size = min(pack_size, most)
        if most > 1:
            num_packs = -(-queries[seqs] // pack_size)
            before = np.repeat(np.cumsum(num_packs) - num_packs, num_packs)
            pack_index = np.arange(num_packs.sum())[:, None] - before[:, None]
            seqs, past = np.repeat(seqs, num_packs), np.repeat(past, num_packs)
        seqs, past = seqs[:, None], past[:, None]
        ends = starts[seqs + 1]
        tokens = starts[seqs] + pack_index * pack_size + np.arange(pack_size)
        own_contexts = contexts[seqs] - ends + 1 + tokens - past * size
        tokens[tokens >= ends] = -1
        columns = past + np.arange(-(-int((contexts[seqs] - past * size).max()) // size))
        own_tables = tables[seqs, np.minimum(columns, tables.shape[1] - 1)]
        order = balanced(own_contexts[:, 0], numba.get_num_threads())
        own = packs.Packs(tokens[order], own_contexts[order], own_tables[order])
        lse = np.full((starts[-1], self.heads), -np.inf, np.float32)
        step.work = packs.AttentionWork(prefixes, own, lse)

    def _short_chunks(
        self, num_chunks: int, queries: Any, contexts: Any, tables: Any
    ) -> list[tuple[Any, int]]:
        """Groups of short chunks behind a shared prefix, whose tokens are treated as decodes."""
        size = self.block_size
        short = np.flatnonzero((queries < contexts) & (queries <= MAX_OWN_TOKENS))
        short = short[short < num_chunks]
        if not len(short):
            return []
        past = (contexts - queries)[short]
        return [
            (short[members], shared)
            for members, shared in shared_prefixes(tables[short], past + 1, size)
            if shared and (contexts[short[members]] - shared * size).max() <= MAX_OWN_TOKENS
        ]

    # ---- once per layer ----

    def norm_rope_store(
        self, layer: int, qkv: Tensor, norms: Norms, rope: Rope, batch: ForwardBatch
    ) -> Tensor:
        """In place: returns qkv as [T, H + 2K, D]; the first H heads are q, the others k and v."""
        follow_torch()  # whose number may have changed since the last layer
        slot_mapping = batch.attention.slot_mapping
        weights = (0, 0) if norms is None else [weight.data_ptr() for weight in norms]
        tensors = (qkv.data_ptr(), *weights, *(table.data_ptr() for table in rope))
        cache = (*self.kv_addresses[layer], slot_mapping, *self.shape)
        arguments = (*tensors, *cache, self.heads, self.eps, *self.examples, *self.scales[layer])
        run(kernels.norm_rope_store_rows, arguments, len(slot_mapping), qkv.numel())
        return qkv.view(len(qkv), -1, self.dim)

    def attend(self, layer: int, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """`qkv` [T, H + 2K, D] is the result of `norm_rope_store`, rounded and scaled for fp8."""
        step: AttentionPlan = batch.attention
        out = qkv.new_empty((len(qkv), self.heads, self.dim))
        if step.prompts:
            q, kv = qkv[:, : self.heads].transpose(0, 1), qkv[:, self.heads :]
            for tokens, padded in step.prompts:
                # Along the first dimension. Along another one, it would copy all of kv first.
                k, v = kv.index_select(0, padded).transpose(0, 1).chunk(2)
                attended = scaled_dot_product_attention(
                    q[None, :, tokens], k[None], v[None], is_causal=True, enable_gqa=True
                )
                out[tokens] = attended[0].transpose(0, 1)
        if step.chunks:
            self.attend_gathered(layer, qkv[:, : self.heads], step.chunks, out)
        if step.work is not None:
            for prefix in step.prefixes:
                self._attend_prefix(prefix, step.work.lse, layer, qkv[:, : self.heads], out)
            tensors = (qkv.data_ptr(), len(qkv), out.data_ptr(), self.heads)
            packs_kernel = self.code[self.unit.attend_packs]
            work = (step.work, *self.examples, packs_kernel, numba.get_num_threads())
            packs.attend(*tensors, *self.kv_addresses[layer], self.shape, *work)
        _, v_scale = self.scales[layer]
        return (out if v_scale == 1 else out.mul_(v_scale)).flatten(1)

    def _attend_prefix(self, prefix: Prefix, lse: Any, layer: int, q: Tensor, out: Tensor) -> None:
        """Writes `lse` and `out`. All queries of a KV head are one sequence of n * G queries."""
        kv = self.read_blocks(layer, prefix.rows).unsqueeze(1)
        tokens, split = torch.from_numpy(prefix.tokens), (len(prefix.tokens), self.group_size)
        queries = q[tokens].unflatten(1, (self.kv_heads, -1)).transpose(0, 1)  # [K, n, G, D]
        attended, logs = flash_attention(queries.flatten(1, 2)[None], *kv)
        out[tokens] = attended[0].unflatten(1, split).transpose(0, 1).flatten(1, 2)
        lse[prefix.tokens] = logs[0].unflatten(1, split).transpose(0, 1).flatten(1).numpy()


def follow_torch() -> None:
    """Give Numba as many threads as torch has."""
    most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(torch.get_num_threads(), most))


def balanced(sizes: Any, parts: int) -> Any:
    """Return an order of items whose `parts` equal parts have about the same total size.

    The items are dealt in order of size, back and forth: 0, 1, 1, 0, 0, 1 with two parts. Each part
    keeps their order, so that packs that read the same blocks stay together.
    """
    turn = np.empty(len(sizes), np.int64)
    turn[np.argsort(sizes, kind="stable")] = np.arange(len(sizes)) % (2 * parts)
    return np.argsort(np.minimum(turn, 2 * parts - 1 - turn), kind="stable")


def shared_prefixes(tables: Any, contexts: Any, block_size: int) -> list[tuple[Any, int]]:
    """Return groups: (indices of sequences, number of leading blocks that their tables share).

    Sequences with the same first block form a group if sharing saves enough; all others form one
    group that shares nothing. Each sequence keeps at least one token of its own.
    """
    groups = []
    alone = np.ones(len(tables), bool)
    first_blocks, counts = np.unique(tables[:, 0], return_counts=True)
    for block in first_blocks[counts > 1]:
        members = np.flatnonzero(tables[:, 0] == block)
        most = (int(contexts[members].min()) - 1) // block_size
        same = (tables[members, :most] == tables[members[0], :most]).all(axis=0)
        shared = most if same.all() else int(same.argmin())
        if shared * block_size * (len(members) - 1) >= MIN_SAVED_TOKENS:
            groups.append((members, shared))
            alone[members] = False
    if alone.any():
        groups.append((np.flatnonzero(alone), 0))
    return groups
