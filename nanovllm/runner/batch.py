"""ForwardBatch: one step as tensors, and the row buffers that it is built from.

`RowBuffers` owns what the runner remembers of each running sequence, in the row that the scheduler
gave it; `apply` and `build` are given a StepPlan, mutate the buffers and return the batch. After
this no layer knows of plans or sequences.

The ragged batch: S sequences side by side, chunks first and then decodes, without padding.

    input_ids     [ a a a a a | b b b | c | d ]        T = 10 tokens, S = 4
    query_start   [ 0           5       8   9   10 ]   token range of each sequence
    context_lens  [ 5, 20, 7, 31 ]                     tokens that it attends over, its own included
    logit_rows    [ 4, 7, 8, 9 ]                       the tokens that a next token is drawn from
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import StepPlan
from nanovllm.runner.logit_rules import RowRules


@dataclass(slots=True)
class ForwardBatch:
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, absolute
    slots: Tensor  # [T] int64, where K and V of each token go
    query_start: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int64
    block_tables: Tensor  # [S, B] int32, padded with the null block
    logit_rows: Tensor  # [R] int64, indices into the T tokens
    num_decodes: int = 0  # of the S, the last so many compute one token each
    attention: Any = None  # what the attention backend derived for this step


@dataclass(slots=True)
class SamplingBatch:
    """How each of the R rows that draw a token is sampled. Filters that no row uses are skipped."""

    temperature: Tensor  # [R] float32; 0 is greedy
    top_k: Tensor  # [R] int64; 0 is off
    top_p: Tensor  # [R] float32; 1 is off
    min_p: Tensor  # [R] float32; 0 is off
    seeds: Tensor  # [R] int64
    positions: Tensor  # [R] int64, of the token to be drawn
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool

    @property
    def filters(self) -> bool:
        return self.any_top_k or self.any_top_p or self.any_min_p


@dataclass(slots=True)
class Steady:
    """What a run of decode steps with the same rows has in common; S rows take part, R draw."""

    decode_rows: list[int]
    rows: np.ndarray  # [S] int64
    query_lens: np.ndarray  # [S] int64
    draws: np.ndarray  # [S] bool
    drawing: Tensor  # [R] int64, the rows that draw
    query_start: Tensor  # [S + 1] int32
    logit_rows: Tensor  # [R] int64
    sampling: SamplingBatch
    ruled: list[tuple[int, RowRules]]  # which of the R have rules


@dataclass
class RowBuffers:
    """N = max_num_seqs rows. Host arrays, but for last_tokens, which the host may not know yet."""

    num_rows: int
    max_blocks: int  # of one sequence
    block_size: int
    vocab_size: int
    device: torch.device
    block_tables: np.ndarray = field(init=False)  # [N, B] int32
    positions: np.ndarray = field(init=False)  # [N] int64, of the next token to compute
    sampling: np.ndarray = field(init=False)  # [4, N] float64: temperature, top_k, top_p, min_p
    seeds: np.ndarray = field(init=False)  # [N] int64
    last_tokens: Tensor = field(init=False)  # [N + 1] int64, drawn last; row N is nobody's
    steady: Steady | None = None  # of the batch built last
    rules: dict[int, RowRules] = field(default_factory=dict)  # of the rows that have any

    def __post_init__(self) -> None:
        self.block_tables = np.zeros((self.num_rows, self.max_blocks), np.int32)
        self.positions = np.zeros(self.num_rows, np.int64)
        self.sampling = np.zeros((4, self.num_rows))
        self.seeds = np.zeros(self.num_rows, np.int64)
        self.last_tokens = torch.zeros(self.num_rows + 1, dtype=torch.int64, device=self.device)

    def apply(self, plan: StepPlan) -> None:
        """Take over what the plan says has changed."""
        for join in plan.joins:
            self.block_tables[join.row, : len(join.block_table)] = join.block_table
            self.block_tables[join.row, len(join.block_table) :] = 0
            s = join.sampling
            self.sampling[:, join.row] = (s.temperature, s.top_k, s.top_p, s.min_p)
            self.seeds[join.row] = s.seed
            self.rules.pop(join.row, None)
            if s.rules is not None:
                self.rules[join.row] = RowRules(
                    s.rules, join.prompt, join.output, self.vocab_size, self.device
                )
        for row, index, block in plan.new_blocks:
            self.block_tables[row, index] = block

    def build(self, plan: StepPlan) -> tuple[ForwardBatch, SamplingBatch]:
        """The step's tensors. Advances the positions of its rows."""
        chunks, size = plan.chunks, self.block_size
        if chunks or self.steady is None or self.steady.decode_rows != plan.decode_rows:
            self.steady = self._gather(plan)
        fixed = self.steady
        rows, num_chunks = fixed.rows, len(chunks)
        for chunk in chunks:
            self.positions[chunk.row] = chunk.start + len(chunk.token_ids)
        self.positions[rows[num_chunks:]] += 1
        context_lens = self.positions[rows]
        last = context_lens - 1  # a decode computes one token, the last of its context
        positions, row_of_token = last, rows
        input_ids = self.last_tokens[fixed.drawing[len(fixed.drawing) - len(plan.decode_rows) :]]
        if chunks:
            spans = [np.arange(c.start, c.start + len(c.token_ids)) for c in chunks]
            positions = np.concatenate((*spans, last[num_chunks:]))
            row_of_token = np.repeat(rows, fixed.query_lens)
            known = np.array([token for c in chunks for token in c.token_ids], np.int64)
            input_ids = torch.cat((self._send(known), input_ids))
        block = self.block_tables[row_of_token, positions // size].astype(np.int64)
        width = -(-int(context_lens.max()) // size)
        lens = self._send(context_lens)
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=self._send(positions),
            slots=self._send(block * size + positions % size),
            query_start=fixed.query_start,
            context_lens=lens,
            block_tables=self._send(self.block_tables[rows, :width]),
            logit_rows=fixed.logit_rows,
            num_decodes=len(plan.decode_rows),
        )
        drawn_at = self._send(context_lens[fixed.draws]) if chunks else lens
        return batch, replace(fixed.sampling, positions=drawn_at)

    def advance(self, decode_rows: list[int]) -> None:
        """A graph computes the next token of these rows: what `build` keeps must stay true."""
        self.positions[decode_rows] += 1
        self.steady = None

    def _gather(self, plan: StepPlan) -> "Steady":
        """What follows from which rows take part and draw, and stays until that changes."""
        chunks = plan.chunks
        rows = np.array([*(c.row for c in chunks), *plan.decode_rows], np.int64)
        query_lens = np.ones(len(rows), np.int64)
        query_lens[: len(chunks)] = [len(c.token_ids) for c in chunks]
        ends = np.cumsum(query_lens)
        draws = np.ones(len(rows), bool)
        draws[: len(chunks)] = [c.sample for c in chunks]
        temperature, top_k, top_p, min_p = self.sampling[:, rows[draws]]
        random = temperature > 0
        drawing = self._send(rows[draws])
        ruled = [(i, self.rules[r]) for i, r in enumerate(rows[draws].tolist()) if r in self.rules]
        sampling = SamplingBatch(
            temperature=self._send(temperature.astype(np.float32)),
            top_k=self._send(top_k.astype(np.int64)),
            top_p=self._send(top_p.astype(np.float32)),
            min_p=self._send(min_p.astype(np.float32)),
            seeds=self._send(self.seeds[rows[draws]]),
            positions=drawing,  # differs in each step: see build
            all_greedy=not random.any(),
            any_top_k=bool((random & (top_k > 0)).any()),
            any_top_p=bool((random & (top_p < 1)).any()),
            any_min_p=bool((random & (min_p > 0)).any()),
        )
        return Steady(
            # With chunks this batch is like no other: an empty list, so that none finds it.
            decode_rows=[] if chunks else plan.decode_rows,
            rows=rows,
            query_lens=query_lens,
            draws=draws,
            drawing=drawing,
            query_start=self._send(np.concatenate(([0], ends)).astype(np.int32)),
            logit_rows=self._send(ends[draws] - 1),
            sampling=sampling,
            ruled=ruled if self.rules else [],
        )

    @property
    def ruled(self) -> list[tuple[int, RowRules]]:
        """Which of the rows that draw from the batch built last have rules."""
        return self.steady.ruled if self.steady is not None else []

    def drawn(self, tokens: Tensor) -> None:
        """Remember the tokens [R] that the batch built last drew: they are the next step's input."""
        assert self.steady is not None
        self.last_tokens[self.steady.drawing] = tokens

    def _send(self, array: np.ndarray) -> Tensor:
        return send(array, self.device)


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, without waiting for it. On a CPU it may share memory with `array`."""
    tensor = torch.from_numpy(array)
    # From pinned memory a copy runs beside the host; pinning copies, so `array` may change at once.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
