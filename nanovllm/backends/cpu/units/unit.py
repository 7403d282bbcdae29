"""Unit: what any.py, avx512.py and amx.py bring, and which of them this processor uses."""

from typing import Protocol

import torch

from nanovllm.backends.cpu.jit import Kernel
from nanovllm.backends.cpu.units.amx import AMX
from nanovllm.backends.cpu.units.any import ANY
from nanovllm.backends.cpu.units.avx512 import AVX512


class Unit(Protocol):
    """Attention, and products of few rows, for processors that have the same instructions."""

    # A group of several queries has at most so many rows: queries times the heads of a KV head.
    max_rows: int
    # Whether attention of many queries is faster than torch's.
    reads_prompts: bool
    # The kernel of attention; see units/any.py.
    attend_groups: Kernel
    # The kernel of products in bfloat16, which reads blocks of `width` outputs of a packed weight.
    # With None, oneDNN computes all products.
    linear_blocks: Kernel | None
    width: int

    def is_available(self) -> bool:
        """Return whether this process can use the unit, and Numba compiles for this processor."""

    def fits(self, group_size: int, block_size: int, head_dim: int) -> bool:
        """Return whether `attend_groups` supports G heads per KV head, B slots, head size D."""


def units(cache_dtype: torch.dtype) -> list[Unit]:
    """Return the units for a KV cache of this dtype. The last one fits every model."""
    if cache_dtype is torch.bfloat16:
        for unit in (AMX, AVX512):
            if unit.is_available():
                return [unit, ANY]
    return [ANY]


def select_unit(cache_dtype: torch.dtype, group_size: int, block_size: int, head_dim: int) -> Unit:
    """Return the first unit that fits."""
    fitting = (unit for unit in units(cache_dtype) if unit.fits(group_size, block_size, head_dim))
    return next(fitting)
