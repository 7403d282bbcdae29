"""Copying blocks of the KV cache, for copy-on-write.

Owns: nothing. Given: the cache and pairs of blocks. Mutates: the cache's blocks that are copied to.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024  # elements that one program copies


@triton.jit
def _copy_rows(
    source, source_rows, target, target_rows, source_plane, target_plane,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """target[plane, target_rows[i]] = source[plane, source_rows[i]]; a row is SIZE elements."""
    pair, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < SIZE
    source_at = source + plane * source_plane + tl.load(source_rows + pair) * SIZE + column
    target_at = target + plane * target_plane + tl.load(target_rows + pair) * SIZE + column
    tl.store(target_at, tl.load(source_at, mask=mask), mask=mask)


def copy_blocks(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """cache[:, target] = cache[:, source]: cache [planes, blocks, ...], source and target [P] int64.

    In two launches by way of a scratch tensor: a block that is written may be read by another pair,
    and every read must come first.
    """
    planes, _, *block = cache.shape
    size = cache[0, 0].numel()
    scratch = torch.empty((planes, len(source), *block), dtype=cache.dtype, device=cache.device)
    own = torch.arange(len(source), device=source.device)
    grid = (len(source), planes, triton.cdiv(size, COLUMNS))
    for src, src_rows, dst, dst_rows in (
        (cache, source, scratch, own),
        (scratch, own, cache, target),
    ):
        _copy_rows[grid](
            src, src_rows, dst, dst_rows, src.stride(0), dst.stride(0),
            SIZE=size, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip


def reference(cache: Tensor, source: Tensor, target: Tensor) -> None:
    cache[:, target] = cache[:, source]  # the right side is a copy
