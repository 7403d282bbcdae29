"""Gathers the inputs of a decode step from the row tensors, on the device."""

from typing import NamedTuple

from torch import Tensor

from nanovllm.models.batch import typed_params


class DecodeInputs(NamedTuple):
    """The inputs of a decode step of S rows."""

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
    """Read the inputs of a decode of `rows` [S], and advance their positions.

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
