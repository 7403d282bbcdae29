"""The interface between the runner and the model: one step as tensors.

Attention, kernels and the sampler receive only these two objects, never a plan or a sequence.

A batch is ragged: S sequences are concatenated without padding, first chunks, then decodes.

    input_ids        [ a a a a a | b b b | c | d ]     T = 10 tokens, S = 4 sequences
    query_start_loc  [ 0           5       8   9  10 ] the first token of each sequence, and T
    context_lens     [ 5, 20, 7, 31 ]                  tokens to attend to, including the step's
    logits_indices   [ 4, 7, 8, 9 ]                    the tokens whose logits are sampled
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import FILTERS


@dataclass(slots=True)
class ForwardBatch:
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, within the sequence
    slot_mapping: Tensor  # [T] int64, the cache slot for K and V of each token
    query_start_loc: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int64
    block_tables: Tensor  # [S, B] int32, padded with the null block
    logits_indices: Tensor  # [R] int64
    query_lens: np.ndarray  # [S] int64, on the host: the number of tokens of each sequence
    host_lens: np.ndarray | None = None  # [S] int64: context_lens, if the host knows them
    num_decodes: int = 0  # the last `num_decodes` sequences have one token each
    order: Tensor | None = None  # [num_decodes] int64: `longest_first`, if it is not the host's
    attention_metadata: Any = None  # set by `prepare` of the attention backend
    states: Any = None  # a StepStates of features/hybrid, if the model has linear attention


@dataclass(slots=True)
class SamplingBatch:
    """The sampling parameters of R rows for their next tokens."""

    temperature: Tensor  # [R] float32; 0 is greedy
    seeds: Tensor  # [R] int64
    positions: Tensor  # [R] int64, of the token to be sampled
    # Name -> values [R], int64 or float32 as in plan.FILTERS. Unused filters may be missing.
    filters: dict[str, Tensor]
    all_greedy: bool = False


def longest_first(context_lens: np.ndarray) -> np.ndarray:
    """Return the indices [S] int64 of sequences by length, for a device that starts them so.

    No long sequence is then still computed when the others have ended.
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

    The others are the tensors of runner/device_rows.py. Row N is padding: it stays at position 0.
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


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it. A CPU tensor may share memory with `array`."""
    tensor = torch.from_numpy(array)
    # Copies from pinned memory are asynchronous. Pinning copies, so `array` may change later.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
