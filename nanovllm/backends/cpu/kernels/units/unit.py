"""Selects the unit of this processor from any.py, avx512.py and amx.py, and its product."""

import torch

from nanovllm.backends.cpu.kernels.parallel import address_for
from nanovllm.backends.cpu.kernels.product import Product
from nanovllm.backends.cpu.kernels.units.amx import AMX
from nanovllm.backends.cpu.kernels.units.any import ANY, Unit
from nanovllm.backends.cpu.kernels.units.avx512 import AVX512


def unit_for(dtype: torch.dtype) -> Unit | None:
    """Return the unit for weights of this dtype, or None: then oneDNN computes all products."""
    if dtype is torch.float32:
        return ANY
    return next((unit for unit in (AMX, AVX512) if unit.is_available()), None)


def product_of(unit: Unit, dtype: torch.dtype) -> Product:
    """Return how the unit multiplies packed weights."""
    return Product(address_for(unit.linear_blocks, dtype, dtype), unit.width)
