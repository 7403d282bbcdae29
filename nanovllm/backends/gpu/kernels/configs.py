"""Tile sizes of the attention kernels, by head size, dtype and GPU.

The sizes come from a table and are not tuned at run time: tuning would delay the start by seconds,
and the same input could give different results. The number of keys of a tile does not depend on the
block size of the cache. The entries follow from shared memory, registers and spills, which
`.ci/compile_kernels.py --table` reports without a GPU, and from sizes published for Hopper GPUs: 16
rows, 32 to 64 keys and 3 to 4 stages for decode; 64 to 128 rows, 64 keys and 2 to 3 stages for
prefill. Prefill with heads of 128 in half precision has been timed on an H100. The decode tiles of
one and two warps, and all others, have not been timed.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """A program computes queries times heads of a group (rows), and loads some keys at a time.

    `num_stages` is the depth of the software pipeline that loads K and V; `programs_per_sm` is the
    number of programs that are resident on one multiprocessor (SM).
    """

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1


@dataclass(frozen=True)
class GpuInfo:
    """The multiprocessors of a GPU, and the shared memory that one program can use."""

    shared_memory_kib: int
    num_sms: int = 132

    @classmethod
    def of(cls, device: torch.device) -> "GpuInfo":
        if device.type != "cuda":
            # Triton's interpreter accepts any tile.
            return cls(shared_memory_kib=99, num_sms=4)
        properties = torch.cuda.get_device_properties(device)
        # AMD GPUs have no separate opt-in limit.
        default = properties.shared_memory_per_block
        size = getattr(properties, "shared_memory_per_block_optin", default)
        return cls(size // 1024, properties.multi_processor_count)


# Tiles by column and by the largest head size that they serve; the numbers are the fields of Tile.
# The column float32 applies on every GPU. Its tiles are small, because it uses no matrix units
# (TF32 would lose precision). The others are for half precision, by the shared memory of a program:
# largest from 200 KiB (sm_90, sm_100), large from 160 KiB (sm_80), medium from 96 KiB (sm_86,
# sm_89, sm_120), small below. `.ci/compile_kernels.py` checks that `programs_per_sm` fit at the
# same time.
LARGE = {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)}
PREFILL = {
    "float32": {64: Tile(64, 32, 8, 2), 128: Tile(32, 16, 8, 2), 256: Tile(16, 16, 4, 2)},
    "largest": LARGE,
    "large": LARGE | {256: Tile(64, 32, 8, 2)},
    "medium": {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(64, 32, 8, 2)},
    "small": {64: Tile(32, 32, 4, 2), 128: Tile(32, 16, 4, 2), 256: Tile(16, 16, 4, 2)},
}
# The warps of a decode program share the keys of a tile, so that every tile needs sums over warps
# and barriers. A single warp needs neither, and fewer instructions in all. Where shared memory
# holds only two or three programs, four warps each hide more of the latencies.
DECODE = {
    "float32": {64: Tile(16, 32, 8, 3, 2), 128: Tile(16, 16, 4, 3, 2), 256: Tile(16, 16, 4, 2, 1)},
    "largest": {64: Tile(16, 32, 1, 3, 11), 128: Tile(16, 32, 1, 3, 6), 256: Tile(16, 32, 4, 3, 3)},
    "large": {64: Tile(16, 32, 1, 3, 8), 128: Tile(16, 32, 1, 3, 4), 256: Tile(16, 32, 4, 3, 2)},
    "medium": {64: Tile(16, 64, 4, 3, 2), 128: Tile(16, 32, 4, 3, 2), 256: Tile(16, 16, 4, 3, 2)},
    "small": {64: Tile(16, 32, 4, 3, 2), 128: Tile(16, 32, 4, 3, 2), 256: Tile(16, 16, 4, 2, 2)},
}
# A key in fp8 has half as many bytes, and its conversion needs registers.
DECODE_FP8 = DECODE | {
    "largest": {64: Tile(16, 64, 1, 3, 8), 128: Tile(16, 64, 2, 3, 4), 256: Tile(16, 32, 2, 3, 3)},
    "medium": {64: Tile(16, 64, 2, 3, 3), 128: Tile(16, 32, 2, 3, 3), 256: Tile(16, 16, 2, 3, 2)},
}


def _look_up(
    table: dict[str, dict[int, Tile]], gpu: GpuInfo, head_dim: int, dtype: torch.dtype
) -> Tile:
    size = gpu.shared_memory_kib
    limits = {"largest": 200, "large": 160, "medium": 96, "small": 0}
    column = next(name for name, limit in limits.items() if size >= limit)
    tiles = table["float32" if dtype == torch.float32 else column]
    if head_dim > max(tiles):
        raise ValueError(
            f"attention_backend='triton' supports head_dim up to {max(tiles)}, and the model has "
            f"{head_dim}; use attention_backend='sdpa'"
        )
    return tiles[min(limit for limit in tiles if limit >= head_dim)]


def prefill_tile(gpu: GpuInfo, head_dim: int, dtype: torch.dtype) -> Tile:
    return _look_up(PREFILL, gpu, head_dim, dtype)


def decode_tile(gpu: GpuInfo, head_dim: int, dtype: torch.dtype, fp8: bool = False) -> Tile:
    """Return the tile for queries of `dtype`. `fp8`: whether the cache is in fp8."""
    return _look_up(DECODE_FP8 if fp8 else DECODE, gpu, head_dim, dtype)
