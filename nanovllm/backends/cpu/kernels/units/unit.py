"""Selects the unit of this processor from any.py, avx512.py and amx.py, and its product."""

import torch

from nanovllm.backends.cpu.kernels.parallel import address_for
from nanovllm.backends.cpu.kernels.product import Product
from nanovllm.backends.cpu.kernels.units.amx import AMX
from nanovllm.backends.cpu.kernels.units.any import ANY, Unit
from nanovllm.backends.cpu.kernels.units.avx512 import AVX512


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


def product_of(unit: Unit) -> Product:
    """Return how the unit multiplies packed weights."""
    dtype = unit.linear_dtype
    return Product(address_for(unit.linear_blocks, dtype, dtype), unit.width)
