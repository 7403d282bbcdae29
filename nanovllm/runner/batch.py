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

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import StepPlan


@dataclass(slots=True)
class ForwardBatch:
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, absolute
    slots: Tensor  # [T] int64, where K and V of each token go
    query_start: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32
    block_tables: Tensor  # [S, B] int32, padded with the null block
    logit_rows: Tensor  # [R] int64, indices into the T tokens
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


@dataclass
class RowBuffers:
    """N = max_num_seqs rows. Host arrays, but for last_tokens, which the host may not know yet."""

    num_rows: int
    max_blocks: int  # of one sequence
    block_size: int
    device: torch.device
    block_tables: np.ndarray = field(init=False)  # [N, B] int32
    positions: np.ndarray = field(init=False)  # [N] int64, of the next token to compute
    sampling: np.ndarray = field(init=False)  # [4, N] float64: temperature, top_k, top_p, min_p
    seeds: np.ndarray = field(init=False)  # [N] int64
    last_tokens: Tensor = field(init=False)  # [N] int64, drawn last

    def __post_init__(self) -> None:
        self.block_tables = np.zeros((self.num_rows, self.max_blocks), np.int32)
        self.positions = np.zeros(self.num_rows, np.int64)
        self.sampling = np.zeros((4, self.num_rows))
        self.seeds = np.zeros(self.num_rows, np.int64)
        self.last_tokens = torch.zeros(self.num_rows, dtype=torch.int64, device=self.device)

    def apply(self, plan: StepPlan) -> None:
        """Take over what the plan says has changed."""
        for join in plan.joins:
            self.block_tables[join.row, : len(join.block_table)] = join.block_table
            self.block_tables[join.row, len(join.block_table) :] = 0
            s = join.sampling
            self.sampling[:, join.row] = (s.temperature, s.top_k, s.top_p, s.min_p)
            self.seeds[join.row] = s.seed
        for row, index, block in plan.new_blocks:
            self.block_tables[row, index] = block

    def build(self, plan: StepPlan) -> tuple[ForwardBatch, SamplingBatch]:
        """The step's tensors. Advances the positions of its rows."""
        chunks = plan.chunks
        lens = [len(c.token_ids) for c in chunks]
        decode = np.array(plan.decode_rows, np.int64)
        rows = np.concatenate((np.array([c.row for c in chunks], np.int64), decode))
        for chunk, length in zip(chunks, lens, strict=True):
            self.positions[chunk.row] = chunk.start + length
        decode_positions = self.positions[decode]
        self.positions[decode] += 1

        spans = [np.arange(c.start, c.start + n) for c, n in zip(chunks, lens, strict=True)]
        positions = np.concatenate((*spans, decode_positions))
        query_lens = np.concatenate((np.array(lens, np.int64), np.ones(len(decode), np.int64)))
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(query_lens, out=query_start[1:])
        row_of_token = np.repeat(rows, query_lens)
        block = self.block_tables[row_of_token, positions // self.block_size].astype(np.int64)
        context_lens = self.positions[rows]
        width = -(-int(context_lens.max()) // self.block_size)
        draws = np.array([*(c.sample for c in chunks), *(True for _ in decode)], bool)

        known = [token for c in chunks for token in c.token_ids]
        input_ids = self._send(np.array(known, np.int64))
        if len(decode):
            input_ids = torch.cat((input_ids, self.last_tokens[self._send(decode)]))
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=self._send(positions),
            slots=self._send(block * self.block_size + positions % self.block_size),
            query_start=self._send(query_start),
            context_lens=self._send(context_lens.astype(np.int32)),
            block_tables=self._send(self.block_tables[rows, :width]),
            logit_rows=self._send(query_start[1:][draws].astype(np.int64) - 1),
        )
        return batch, self._sampling_batch(rows[draws], context_lens[draws])

    def _sampling_batch(self, rows: np.ndarray, positions: np.ndarray) -> SamplingBatch:
        temperature, top_k, top_p, min_p = self.sampling[:, rows]
        random = temperature > 0
        return SamplingBatch(
            temperature=self._send(temperature.astype(np.float32)),
            top_k=self._send(top_k.astype(np.int64)),
            top_p=self._send(top_p.astype(np.float32)),
            min_p=self._send(min_p.astype(np.float32)),
            seeds=self._send(self.seeds[rows]),
            positions=self._send(positions),
            all_greedy=not random.any(),
            any_top_k=bool((random & (top_k > 0)).any()),
            any_top_p=bool((random & (top_p < 1)).any()),
            any_min_p=bool((random & (min_p > 0)).any()),
        )

    def drawn(self, plan: StepPlan, tokens: Tensor) -> None:
        """Remember the drawn tokens [R]: they are the next step's input."""
        rows = [c.row for c in plan.chunks if c.sample] + plan.decode_rows
        self.last_tokens[self._send(np.array(rows, np.int64))] = tokens

    def _send(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
