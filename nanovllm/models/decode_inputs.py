"""What a decode reads of its rows, from tensors on the device. The reference for a GPU's kernel."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from nanovllm.plan import FILTERS


def longest_first(context_lens: np.ndarray) -> np.ndarray:
    """Return the indices [S] int64 of sequences by length, for a device that starts them in order.

    A long sequence that started last would still run when all others have ended.
    """
    return np.argsort(-context_lens, kind="stable")


class DecodeInputs(NamedTuple):
    """What `decode_inputs` reads for a decode of S rows."""

    input_ids: Tensor  # [S] int64
    positions: Tensor  # [S] int64
    slot_mapping: Tensor  # [S] int64
    context_lens: Tensor  # [S] int64
    block_tables: Tensor  # [S, B] int32, undefined after the blocks of the context
    params: list[Tensor]  # [S], the temperature and each filter, as in SamplingBatch
    seeds: Tensor  # [S] int64


def decode_inputs(
    rows: Tensor,
    block_tables: Tensor,
    positions: Tensor,
    params: Tensor,
    seeds: Tensor,
    last_tokens: Tensor,
    block_size: int,
) -> DecodeInputs:
    """Read what a decode of `rows` [S] needs, and advance their positions.

    The other tensors are in runner/device_rows.py. Row N is padding and stays at position 0.
    """
    positions[-1:].zero_()
    at = positions[rows]
    positions[rows] = context_lens = at + 1
    tables = block_tables[rows]
    blocks = block_tables[rows, at // block_size]
    slots = blocks * block_size + at % block_size
    values = typed_params(params[:, rows])
    return DecodeInputs(last_tokens[rows], at, slots, context_lens, tables, values, seeds[rows])


def typed_params(params: Tensor | list[Tensor]) -> list[Tensor]:
    """Convert the temperature and each filter [R] float32 to the dtypes of SamplingBatch."""
    temperature, *values = params
    pairs = zip(FILTERS.values(), values, strict=True)
    return [temperature, *(x.long() if isinstance(off, int) else x for off, x in pairs)]
