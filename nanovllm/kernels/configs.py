"""The table of tile sizes: which configuration attention runs in, by head size, dtype and GPU.

Owns: the table. There is no autotuning at run time: a start must not cost seconds, and the same
input must give the same result. A tile's keys are independent of the cache's block size.

How the entries were found: by shared memory, registers and spills, which ahead-of-time compilation
tells without a GPU (`.ci/compile_kernels.py --table` compiles every entry for every target), and by
what others measured on Hopper cards: 16 rows and 32 to 64 keys in 3 to 4 stages for decode, 64 to 128
rows and 64 keys in 2 to 3 for prefill. They have not been timed on a GPU by this project yet.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    rows: int  # queries times heads of a group
    keys: int  # positions loaded at a time
    warps: int
    stages: int  # loads of K and V in flight
    resident: int = 1  # programs that one multiprocessor holds at once


@dataclass(frozen=True)
class Card:
    """What of a GPU decides the tiles."""

    shared_kib: int  # shared memory that one program may have
    processors: int = 132  # multiprocessors

    @classmethod
    def of(cls, device: torch.device) -> "Card":
        if device.type != "cuda":  # the interpreter: any will do
            return cls(shared_kib=99, processors=4)
        found = torch.cuda.get_device_properties(device)
        # AMD has no second limit to opt in to.
        shared = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
        return cls(shared // 1024, found.multi_processor_count)


# [head_dim, at most][column] -> Tile. float32 has no matrix units here (tf32 would not be float32), so
# its tiles are small on every card. Half precision goes by the shared memory of a program:
# large, 160 KiB or more: sm_80, sm_90, sm_100; medium, 96: sm_86, sm_89, sm_120; small: the rest.
PREFILL = {
    64: {
        "float32": Tile(64, 32, 8, 2),
        "large": Tile(128, 64, 8, 3),
        "medium": Tile(64, 64, 4, 2),
        "small": Tile(32, 32, 4, 2),
    },
    128: {
        "float32": Tile(32, 16, 8, 2),
        "large": Tile(128, 64, 8, 3),
        "medium": Tile(64, 64, 4, 2),
        "small": Tile(32, 32, 4, 2),
    },
    256: {
        "float32": Tile(16, 16, 4, 2),
        "large": Tile(64, 64, 8, 2),
        "medium": Tile(64, 32, 4, 2),
        "small": Tile(16, 16, 4, 2),
    },
}
DECODE = {
    64: {
        "float32": Tile(16, 32, 8, 3, 2),
        "large": Tile(16, 64, 4, 3, 5),
        "medium": Tile(16, 64, 4, 3, 2),
        "small": Tile(16, 32, 4, 3, 2),
    },
    128: {
        "float32": Tile(16, 16, 4, 3, 2),
        "large": Tile(16, 64, 4, 3, 3),
        "medium": Tile(16, 32, 4, 3, 2),
        "small": Tile(16, 32, 4, 3, 1),
    },
    256: {
        "float32": Tile(16, 16, 4, 2, 1),
        "large": Tile(16, 32, 4, 3, 3),
        "medium": Tile(16, 16, 4, 3, 2),
        "small": Tile(16, 16, 4, 2, 1),
    },
}


def prefill_tile(card: Card, head_dim: int, dtype: torch.dtype) -> Tile:
    return _find(PREFILL, card, head_dim, dtype)


def decode_tile(card: Card, head_dim: int, dtype: torch.dtype) -> Tile:
    return _find(DECODE, card, head_dim, dtype)


def _find(table: dict[int, dict[str, Tile]], card: Card, head_dim: int, dtype: torch.dtype) -> Tile:
    if head_dim > max(table):
        raise ValueError(
            f"attention_backend='triton' has no tile for head_dim {head_dim}, only up to "
            f"{max(table)}; use attention_backend='sdpa'"
        )
    column = "large" if card.shared_kib >= 160 else "medium" if card.shared_kib >= 96 else "small"
    if dtype == torch.float32:
        column = "float32"
    return table[min(size for size in table if size >= head_dim)][column]
