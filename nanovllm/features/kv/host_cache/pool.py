"""HostPool: KV blocks in host memory, and the copies between them and the KV cache.

host_blocks.py decides which block is where, and a pool makes the copies: the saves of a plan before
anything else in the step, the loads before the step computes. On a GPU the host memory is pinned,
so that the host does not wait for a copy. All copies are on the stream of the steps, which defines
their order: a block is saved before the step overwrites it, and loaded before the step reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.plan import BlockCopy
from nanovllm.utils.host import available_host_memory
from nanovllm.utils.log import progress_bar

CHUNK_BYTES = 256 << 20  # torch rounds an allocation of pinned memory up to a power of two


def num_host_blocks(config: EngineConfig, block_bytes: int, free_of_cpu: int | None) -> int:
    """Return the number of blocks that the option swap_space holds.

    free_of_cpu: bytes that are free next to weights and KV cache, if these are in host memory too.
    Raises ValueError if swap_space is less than one block, or more than the free host memory.
    """
    size = int(config.swap_space * 2**30)
    free, where = free_of_cpu, " next to weights and KV cache"
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


class HostPool:
    """Blocks in host memory for a KV cache."""

    def __init__(self, num_blocks: int, cache: Tensor) -> None:
        """Allocate `num_blocks` blocks [layers, 2, K, B, D] in the dtype of `cache`."""
        block = cache[:, :, 0]
        pinned = cache.device.type == "cuda"
        self.num_blocks = num_blocks
        self.per_chunk = max(1, CHUNK_BYTES // block.nbytes)
        starts = range(0, num_blocks, self.per_chunk)
        self.chunks = [
            torch.empty(
                (min(self.per_chunk, num_blocks - start), *block.shape),
                dtype=block.dtype,
                device="cpu",
                pin_memory=pinned,
            )
            for start in (progress_bar("Pinning memory", "chunk", starts) if pinned else starts)
        ]

    def block(self, host_block: int) -> Tensor:
        """Return the memory of a host block: [layers, 2, K, B, D] in the dtype of the cache."""
        return self.chunks[host_block // self.per_chunk][host_block % self.per_chunk]

    def save(self, cache: Tensor, copies: list[BlockCopy]) -> None:
        """Copy blocks of the cache to host blocks. Later operations may overwrite the cache."""
        for block, host_block in copies:
            self.block(host_block).copy_(cache[:, :, block], non_blocking=True)

    def load(self, cache: Tensor, copies: list[BlockCopy]) -> None:
        """Copy host blocks to blocks of the cache. Later operations read them there."""
        for host_block, block in copies:
            cache[:, :, block].copy_(self.block(host_block), non_blocking=True)
