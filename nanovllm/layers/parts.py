"""in_parts: elementwise work on many rows, so that what it makes in between stays in the cache."""

from collections.abc import Callable

import torch
from torch import Tensor

PART = 1 << 19  # elements of the first tensor


def in_parts(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """function(*tensors), of tensors that have a row for each token and do not mix them.

    For a prompt of thousands of tokens a CPU gets new pages for each tensor in between, and that
    takes several times as long as the arithmetic.
    """
    first = tensors[0]
    if first.numel() <= PART:
        return function(*tensors)
    rows = max(1, PART * len(first) // first.numel())
    parts = zip(*(t.split(rows) for t in tensors), strict=True)
    return torch.cat([function(*part) for part in parts])
