"""What the tests on a GPU, and of its kernels in the interpreter, share.

Their files are parts of at most five minutes each on a card, with an empty cache of Triton: a
variant of a kernel takes one or two seconds to compile, and so do the graphs of an engine.
test_dry_run.py counts the variants of each part. A case is there if it proves something else.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda:0"

# ||found - wanted|| / ||wanted||, against a float32 reference on the same inputs.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Paged(NamedTuple):
    """Keys and values of sequences, in blocks in random order."""

    k: Tensor
    v: Tensor
    tables: Tensor
    contexts: Tensor


def paged(
    contexts: list[int],
    kv_heads: int,
    dim: int,
    size: int,
    dtype: torch.dtype,
    device: str = DEVICE,
) -> Paged:
    """Random keys and values, with NaN in slots that nobody wrote, in block 0 and in the last one."""
    counts = [-(-n // size) for n in contexts]
    order = (torch.randperm(sum(counts)) + 1).int()
    tables = torch.zeros((len(contexts), max(counts) + 1), dtype=torch.int32)
    shape = (sum(counts) + 2, kv_heads, size, dim)
    k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    for cache in (k, v):
        cache[0] = cache[-1] = float("nan")
    for seq, count in enumerate(counts):
        start = sum(counts[:seq])
        tables[seq, :count] = order[start : start + count]
        last, used = int(tables[seq, count - 1]), contexts[seq] - (count - 1) * size
        k[last, :, used:], v[last, :, used:] = float("nan"), float("nan")
    return Paged(k, v, tables.to(device), torch.tensor(contexts, device=device))


def needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9) and not torch.version.hip:
        pytest.skip("no instructions for fp8")


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    difference = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    assert difference == difference, "NaN"
    return difference
