"""Memory on huge pages, for the KV cache and for packed weights."""

import math

import numpy as np
import torch
from torch import Tensor

PAGE_BYTES = 4096
WEIGHT_BYTES = 64 << 20  # that are allocated for many weights together


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate on huge pages where the system has them, aligned to a page.

    A cache gets its pages when they are first written; with pages of 4 kB that is hundreds of page
    faults per block. numpy asks Linux for pages of 2 MB, torch does not. The alignment puts rows of
    64 bytes and more into as few cache lines as possible.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.empty(size + PAGE_BYTES, np.uint8))
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + size].view(dtype).view(shape)


class WeightMemory:
    """Memory for weights, which are read faster from huge pages.

    A prefetch of a page of 4 kB that the processor has not just used is slow.
    """

    def __init__(self) -> None:
        self.free = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized weight."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self.free):
            self.free = allocate((max(size, WEIGHT_BYTES),), torch.uint8)
        weight = self.free[:size].view(dtype).view(shape)
        self.free = self.free[-(-size // 64) * 64 :]
        return weight
