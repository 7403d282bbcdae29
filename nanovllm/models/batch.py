"""The interface between the runner and the model: one step as tensors.

Attention, kernels and the sampler receive only these two objects, never a plan or a sequence.

A batch is ragged: S sequences are concatenated without padding, first chunks, then decodes.

    input_ids        [ a a a a a | b b b | c | d ]     T = 10 tokens, S = 4 sequences
    query_start_loc  [ 0           5       8   9  10 ] the first token of each sequence, and T
    context_lens     [ 5, 20, 7, 31 ]                  tokens to attend to, including the step's
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from nanovllm.features.models.hybrid.states import StepStates


@dataclass(slots=True)
class ForwardBatch:
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, within the sequence
    slot_mapping: Tensor  # [T] int64, the cache slot for K and V of each token
    query_start_loc: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int64
    block_tables: Tensor  # [S, B] int32, padded with the null block
    query_lens: np.ndarray  # [S] int64, on the host: the number of tokens of each sequence
    host_lens: np.ndarray | None = None  # [S] int64: context_lens, if the host knows them
    num_decodes: int = 0  # the last `num_decodes` sequences have one token each
    order: Tensor | None = None  # [num_decodes] int64: decodes, longest context first (GPU)
    attention_metadata: Any = None  # set by `prepare` of the attention backend
    states: StepStates | None = None  # if the model has linear attention


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
    """Return the indices [S] int64 of sequences by length, for a device that starts them in order.

    A long sequence that started last would still run when all others have ended.
    """
    return np.argsort(-context_lens, kind="stable")
