"""HostPool: KV blocks in host memory, and the copies between them and the KV cache.

host_blocks.py decides which block is where, and a pool makes the copies: the saves
of a plan before anything else in the step, the loads before the step computes.

On a CPU both are plain copies. On a GPU the parts of a block are far apart in the cache, [layers,
2, blocks, K, B, D], so a copy has two parts, with a staging buffer on the device between them:

    save    cache ----gather----> staging ----transfer----> pinned host memory
    load    cache <---scatter---- staging <---transfer----- pinned host memory
                   steps' stream            the pool's stream

The streams define the order. A saved block is gathered before later kernels of the step overwrite
it, and its transfer overlaps with the computation. The transfer of a load can begin while the
previous step runs, and the step waits for an event after it. Transfers are in the order of the
plans, so a load reads the data of an earlier save. Each use of a buffer waits for the last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.models.transfers import to_device
from nanovllm.plan import BlockCopy
from nanovllm.utils.host import available_host_memory
from nanovllm.utils.log import progress_bar

CHUNK_BYTES = 256 << 20  # torch rounds an allocation of pinned memory up to a power of two
STAGING_BYTES = 64 << 20  # of each of the two staging buffers on a GPU


def num_host_blocks(config: EngineConfig, block_bytes: int, free_of_cpu: int | None) -> int:
    """Return the number of blocks that the option swap_space holds.

    free_of_cpu: bytes that are free next to weights and KV cache, if these are in host memory too.
    Raises ValueError if swap_space is less than one block, or more than the free host memory.
    """
    size, free, where = int(config.swap_space * 2**30), free_of_cpu, " next to weights and KV cache"
    if free is None:
        free, where = available_host_memory() // config.tensor_parallel_size, ""
    if size > free:
        raise ValueError(
            f"swap_space={config.swap_space} takes {size:,} bytes of host memory, and {free:,} "
            f"are free{where}; lower it, or end other programs"
        )
    if size < block_bytes:
        raise ValueError(
            f"swap_space={config.swap_space} has no room for one block; raise it to "
            f"{block_bytes / 2**30:.2g} or more, or set it to 0"
        )
    return size // block_bytes


def make_pool(num_blocks: int, cache: Tensor) -> HostPool:
    """Return a pool of `num_blocks` blocks for a KV cache like `cache`."""
    kind = PinnedPool if cache.device.type == "cuda" else HostPool
    return kind(num_blocks, cache[:, :, 0])


class HostPool:
    """A pool for a device that shares its memory with the host."""

    def __init__(self, num_blocks: int, block: Tensor) -> None:
        """Allocate `num_blocks` blocks like `block` [layers, 2, K, B, D] of the cache."""
        self.num_blocks = num_blocks
        self.blocks = torch.empty((num_blocks, *block.shape), dtype=block.dtype)

    def block(self, host_block: int) -> Tensor:
        """Return the memory of a host block: [layers, 2, K, B, D] in the dtype of the cache."""
        return self.blocks[host_block]

    def save(self, cache: Tensor, copies: list[BlockCopy]) -> None:
        """Copy blocks of the cache to host blocks. Later operations may overwrite the cache."""
        for block, host_block in copies:
            self.blocks[host_block] = cache[:, :, block]

    def load(self, cache: Tensor, copies: list[BlockCopy]) -> None:
        """Copy host blocks to blocks of the cache. Later operations read them there."""
        for host_block, block in copies:
            cache[:, :, block] = self.blocks[host_block]


class PinnedPool(HostPool):
    """A pool in pinned memory, for a GPU."""

    def __init__(self, num_blocks: int, block: Tensor) -> None:
        # fp8 is copied as uint8, so that index_select and index_copy_ need not support it.
        self.dtype = torch.uint8 if block.itemsize == 1 else block.dtype
        self.num_blocks, shape, device = num_blocks, block.shape, block.device
        self.per_chunk = max(1, CHUNK_BYTES // block.nbytes)
        starts = range(0, num_blocks, self.per_chunk)
        sizes = [min(self.per_chunk, num_blocks - start) for start in starts]
        self.chunks = [
            torch.empty((size, *shape), dtype=self.dtype, pin_memory=True)
            for size in progress_bar("Pinning memory", "chunk", sizes)
        ]
        # Graphs are captured on streams of another priority, so that this stream is not shared.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.ready = torch.cuda.Event()
        staged = max(1, min(STAGING_BYTES // block.nbytes, num_blocks))
        self.staging = [
            (torch.empty((staged, *shape), dtype=self.dtype, device=device), torch.cuda.Event())
            for _ in range(2)
        ]
        self.turns = itertools.cycle(self.staging)
        self.cache_dtype = block.dtype

    def block(self, host_block: int) -> Tensor:
        self.stream.synchronize()  # its last transfer has ended
        chunk = self.chunks[host_block // self.per_chunk]
        return chunk[host_block % self.per_chunk].view(self.cache_dtype)

    def save(self, cache: Tensor, copies: list[BlockCopy]) -> None:
        blocks = cache.view(self.dtype).movedim(2, 0)
        with synchronized_on_error():
            for sources, targets, buffer, used in self.parts(copies):
                used.wait()
                index = to_device(np.array(sources), cache.device)
                torch.index_select(blocks, 0, index, out=buffer)
                self.ready.record()
                with torch.cuda.stream(self.stream):
                    self.ready.wait()
                    for where, run in self.runs(targets):
                        run.copy_(buffer[where], non_blocking=True)
                    used.record()

    def load(self, cache: Tensor, copies: list[BlockCopy]) -> None:
        blocks = cache.view(self.dtype).movedim(2, 0)
        with synchronized_on_error():
            for sources, targets, buffer, used in self.parts(copies):
                with torch.cuda.stream(self.stream):
                    used.wait()
                    for where, run in self.runs(sources):
                        buffer[where].copy_(run, non_blocking=True)
                    self.ready.record()
                index = to_device(np.array(targets), cache.device)
                self.ready.wait()
                blocks.index_copy_(0, index, buffer)
                used.record()

    def parts(
        self, copies: list[BlockCopy]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Tensor, torch.cuda.Event]]:
        """Yield sources, targets, a buffer that holds them, and the event of its last use."""
        size = len(self.staging[0][0])
        for start in range(0, len(copies), size):
            sources, targets = zip(*copies[start : start + size], strict=True)
            buffer, used = next(self.turns)
            yield sources, targets, buffer[: len(sources)], used

    def runs(self, host_blocks: tuple[int, ...]) -> Iterator[tuple[slice, Tensor]]:
        """Yield runs of consecutive blocks: their slice of `host_blocks`, and their memory."""
        size = self.per_chunk
        placed = itertools.groupby(enumerate(host_blocks), lambda x: (x[1] - x[0], x[1] // size))
        for _, group in placed:
            [(start, block), *rest] = group
            first, num = block % size, 1 + len(rest)
            yield slice(start, start + num), self.chunks[block // size][first : first + num]


@contextmanager
def synchronized_on_error() -> Iterator[None]:
    """Wait for the device if a copy is interrupted: a buffer may be in use without an event."""
    try:
        yield
    except BaseException:
        torch.cuda.synchronize()
        raise
