"""States: the states of all sequences in the layers of linear attention, on the device.

    number   0 ... N - 1   N       N + 1 ...
    state    of each row   padding snapshots for the prefix cache

A row's state is changed by every step that computes tokens of the row. A chunk that begins with
token 0 begins with zeros. The runner copies states between rows and snapshots, as a plan says:
`before` it computes anything, in the middle of a chunk, or `after` the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.features.models.hybrid import delta_rule
from nanovllm.features.models.hybrid.delta_rule import Segments
from nanovllm.features.models.hybrid.hybrid_config import KERNEL_SIZE, HybridConfig
from nanovllm.features.models.hybrid.qwen3_5 import LinearAttention
from nanovllm.models.backend import Backend
from nanovllm.models.transfers import to_device
from nanovllm.plan import StepPlan
from nanovllm.utils.log import logger

SLOTS_PER_ROW = 2  # slots for snapshots, if memory allows


def kernels_of(backend: Backend) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """Return the functions `decode` and `chunk` of a backend, with the arguments of delta_rule."""
    kernels = backend.delta_rule() or delta_rule
    return kernels.decode, getattr(kernels, "chunk", delta_rule.chunk)


class States:
    def __init__(self, config: HybridConfig, num_states: int, backend: Backend) -> None:
        """Allocate the states. Their content is undefined until they are written."""
        self.num_states = num_states
        layers = config.num_linear_layers
        heads = config.linear_num_value_heads
        dims = config.linear_key_head_dim, config.linear_value_head_dim
        self.rule = backend.empty(layers, num_states, heads, *dims, dtype=torch.float32)
        self.conv = backend.empty(layers, num_states, KERNEL_SIZE - 1, config.conv_size)
        self.decode, self.chunk = kernels_of(backend)

    @property
    def nbytes(self) -> int:
        return int(self.rule.nbytes + self.conv.nbytes)

    def before(self, plan: StepPlan) -> None:
        """Copy states before a step. All reads precede all writes."""
        self._copy(plan.state_copies)

    def after(self, plan: StepPlan) -> None:
        """Copy the states that a step leaves in its rows."""
        self._copy([(s.row, s.target) for s in plan.state_saves if not s.tokens_after])

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            source, target = to_device(np.array(pairs).T.copy(), self.rule.device)
            for states in (self.rule, self.conv):
                for layer in states:  # all layers at once would need more memory
                    layer[target] = layer[source]

    def of_plan(self, plan: StepPlan) -> StepStates:
        """Return the states of a step with chunks, or of decodes whose rows are on the host."""
        step = StepStates(self)
        if plan.decode_rows:
            step.rows = to_device(np.array(plan.decode_rows), self.rule.device)
        cuts: dict[int, list[Any]] = {}
        for save in plan.state_saves:
            if save.tokens_after:
                cuts.setdefault(save.row, []).append(save)
        start = 0
        for chunk in plan.chunks:
            end = start + len(chunk.token_ids)
            is_first = chunk.start == 0
            saves = sorted(cuts.get(chunk.row, []), key=lambda save: -save.tokens_after)
            ends = sorted({end - save.tokens_after for save in saves} | {end})
            for number, stop in enumerate(ends):
                if number == len(step.rounds):
                    step.rounds.append(Segments([], [], [], []))
                    step.saves.append([])
                segments = step.rounds[number]
                segments.rows.append(chunk.row)
                segments.starts.append(start)
                segments.ends.append(stop)
                segments.is_first.append(is_first)
                targets = [save.target for save in saves if end - save.tokens_after == stop]
                step.saves[number] += [(chunk.row, target) for target in targets]
                start = stop
                is_first = False
        return step

    def of_decodes(self, rows: Tensor) -> StepStates:
        """Return the states of a step that decodes `rows` [S], which are on the device."""
        return StepStates(self, rows=rows)


@dataclass
class StepStates:
    """The states that one step changes: ForwardBatch.states.

    A chunk is computed in several rounds if a state in the middle of it is saved. The tokens of
    chunks come first, then one token of each decode row.
    """

    states: States
    rounds: list[Segments] = field(default_factory=list)
    # (row, target) of the copies after each round
    saves: list[list[tuple[int, int]]] = field(default_factory=list)
    rows: Tensor | None = None  # [S] int64, the decode rows

    def attend(self, layer: LinearAttention, x: Tensor) -> Tensor:
        """Map projections x [T, C + Hv Dv + 2 Hv] to the outputs [T, Hv Dv] of a layer."""
        states = self.states
        conv, rule = states.conv[layer.layer], states.rule[layer.layer]
        if not self.rounds:
            assert self.rows is not None
            decoded: Tensor = states.decode(layer, x, conv, rule, self.rows)
            return decoded
        _, value_heads, _, value_dim = layer.sizes
        out = x.new_empty((len(x), value_heads * value_dim))
        for segments, saves in zip(self.rounds, self.saves, strict=True):
            states.chunk(layer, x, conv, rule, segments, out)
            for row, target in saves:
                conv[target], rule[target] = conv[row], rule[row]
        if self.rows is not None:
            num = len(x) - len(self.rows)
            out[num:] = states.decode(layer, x[num:], conv, rule, self.rows)
        return out


def num_states(config: EngineConfig, state_bytes: int, max_bytes: int) -> tuple[int, int, int]:
    """Return (rows, slots for the prefix cache, bytes of all states) for states of `state_bytes`.

    States take at most half of `max_bytes`; the KV cache takes the rest. If they do not fit,
    fewer sequences run at a time.
    """
    fit = max_bytes // 2 // state_bytes - 1  # the padding row has a state too
    slots = config.num_state_slots if config.enable_prefix_caching else 0
    if slots is None:
        rows = max(1, min(config.max_num_seqs, fit // (1 + SLOTS_PER_ROW)))
        slots = max(0, min(rows * SLOTS_PER_ROW, fit - rows))
    else:
        rows = max(1, min(config.max_num_seqs, fit - slots))
    size = (rows + 1 + slots) * state_bytes
    if size > max_bytes:
        raise ValueError(
            f"the states of {rows} sequence(s) and num_state_slots={slots:,} take {size:,} bytes, "
            f"and KV cache and states may take {max_bytes:,}; lower num_state_slots, or set "
            "a larger kv_cache_memory_bytes"
        )
    if rows < config.max_num_seqs:
        logger.info(
            f"a state takes {state_bytes / 2**20:,.1f} MiB, which limits max_num_seqs to {rows} "
            f"instead of {config.max_num_seqs}"
        )
    return rows, slots, size
