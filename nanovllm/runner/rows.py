"""Rows: the runner's data about each running sequence, and the batches that are built from it.

Every running sequence has a row (vLLM: `InputBatch`). The data is in host arrays, except the last
sampled tokens. On a GPU, runner/device_runner.py has the same arrays and builds the decode steps.

    rows   [ 4 | 0 | 7 | N ]   a decode of 3 rows, padded to the captured size of 4
             |   |   |   `--- row N is padding: its block table is the null block, its position 0
             v   v   v
    last token, position, block table and sampling of each row  ->  one ForwardBatch, SamplingBatch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.models.batch import ForwardBatch, SamplingBatch
from nanovllm.models.transfers import send
from nanovllm.plan import FILTERS, ResultKind, StepPlan

if TYPE_CHECKING:
    from nanovllm.features.sampling.logit_rules.row_rules import RulesBatch, RulesState


@dataclass(slots=True)
class StepBatch:
    """A plan as tensors. The step has S sequences, of which R sample a token.

    Consecutive decode steps of the same rows share one StepBatch. A new one for 64 rows would take
    61 instead of 25 us (`python bench.py --host-only`, EPYC, 2026-11-28).
    """

    decode_rows: list[int]  # [] for a plan with chunks
    rows: np.ndarray  # [S] int64
    query_lens: np.ndarray  # [S] int64
    sampled: np.ndarray  # [R] int64, the sequence of each token that is sampled
    tokens_after: np.ndarray  # [R] int64, the number of drafts that follow in its sequence
    query_start_loc: Tensor  # [S + 1] int32
    logits_indices: Tensor  # [R] int64, the tokens whose logits are sampled
    sampling_rows: Tensor  # [R] int64
    sampling_batch: SamplingBatch
    num_decodes: int  # number of consecutive one-token sequences at the end, chunks included
    forward_batch: ForwardBatch = field(init=False)
    rules: RulesBatch | None = None  # if a row that samples has rules


class Rows:
    rules: RulesState | None = None  # from the first row with rules on
    make_rules: Callable[[], RulesState]  # set by loading/make_runner.py

    def __init__(
        self, num_rows: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        """Allocate N = `num_rows` rows. A sequence has at most B = `max_blocks` blocks."""
        self.num_rows = num_rows
        self.block_size = block_size
        self.device = device
        self.block_tables = np.zeros((num_rows + 1, max_blocks), np.int32)
        self.positions = np.zeros(num_rows + 1, np.int64)  # of the next token to compute
        # The temperature and each filter; the padding row is greedy and has no filters.
        self.params = np.zeros((1 + len(FILTERS), num_rows + 1), np.float32)
        self.params[1:, num_rows] = list(FILTERS.values())
        self.seeds = np.zeros(num_rows + 1, np.int64)
        # The last sampled tokens [N + 1], on the device only: the host may not have them yet.
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.step: StepBatch | None = None  # the last step built

    def apply(self, plan: StepPlan) -> None:
        """Apply the new rows and new blocks of a plan, and advance the positions of its rows."""
        self.step = None if plan.new_rows else self.step  # it has the sampling of the old rows
        for new_row in plan.new_rows:
            row, table = new_row.row, new_row.block_table
            sampling = new_row.sampling
            self.block_tables[row, : len(table)] = table
            self.block_tables[row, len(table) :] = 0
            self.params[:, row] = (sampling.temperature, *sampling.filters)
            self.seeds[row] = sampling.seed
            if self.rules is None and sampling.rules is not None:
                self.rules = self.make_rules()
            if self.rules is not None:
                self.rules.replace_row(new_row)
        for row, index, block in plan.new_blocks:
            self.block_tables[row, index] = block
        self.positions[plan.decode_rows] += 1
        for chunk in plan.chunks:
            self.positions[chunk.row] = chunk.start + len(chunk.token_ids)
            if chunk.output is not None and self.rules is not None:
                self.rules.replace_output(chunk)

    def build(self, plan: StepPlan) -> StepBatch:
        """Build the batch of a plan from the host arrays, decodes last. Call `apply` first."""
        chunks, decode_rows = plan.chunks, plan.decode_rows
        if chunks or self.step is None or self.step.decode_rows != decode_rows:
            self.step = self._start_step(plan)
        step = self.step
        rows = step.rows
        context_lens = self.positions[rows]
        positions, token_rows = context_lens - 1, rows  # a decode computes only its last position
        if chunks:
            spans = [np.arange(c.start, c.start + len(c.token_ids)) for c in chunks]
            positions = np.concatenate((*spans, positions[len(chunks) :]))
            token_rows = np.repeat(rows, step.query_lens)
        chunk_tokens, sent_positions, slots, lens, tables, sampling_positions = send(
            self.device,
            np.array([token for c in chunks for token in c.token_ids], np.int64),
            positions,
            self.slots(token_rows, positions),
            context_lens,
            self.block_tables[:, : -(-int(context_lens.max()) // self.block_size)][rows],
            context_lens[step.sampled] - step.tokens_after,
        )
        last = self.last_tokens[step.sampling_rows[len(step.sampling_rows) - len(decode_rows) :]]
        step.forward_batch = ForwardBatch(
            input_ids=torch.cat((chunk_tokens, last)) if chunks else last,
            positions=sent_positions,
            slot_mapping=slots,
            query_start_loc=step.query_start_loc,
            context_lens=lens,
            block_tables=tables,
            query_lens=step.query_lens,
            host_lens=context_lens,
            num_decodes=step.num_decodes,
        )
        step.rules = self.rules_of(rows[step.sampled])
        step.sampling_batch.positions = sampling_positions
        return step

    def rules_of(self, rows: list[int] | np.ndarray) -> RulesBatch | None:
        """Return the rules of `rows` [R], or None if no row has rules."""
        return None if self.rules is None else self.rules.batch(rows, self.positions)

    def record(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Record the sampled tokens of `rows` [R], which are the inputs of their next step.

        Returns the tokens. Each -1, which means that no token can be sampled, is replaced by 0.
        """
        self.last_tokens[rows] = tokens = tokens.clamp(min=0)
        return tokens

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the cache slots [T] of the tokens at `positions` [T] of `rows` [T]."""
        blocks = self.block_tables[rows, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def _start_step(self, plan: StepPlan) -> StepBatch:
        chunks = plan.chunks
        rows = np.array([*(c.row for c in chunks), *plan.decode_rows], np.int64)
        query_lens = np.ones(len(rows), np.int64)
        query_lens[: len(chunks)] = [len(c.token_ids) for c in chunks]
        starts = np.concatenate(([0], np.cumsum(query_lens)))
        counts = np.ones(len(rows), np.int64)  # tokens that each sequence samples
        counts[: len(chunks)] = [
            1 + c.num_drafts if c.result_kind is ResultKind.TOKEN else 0 for c in chunks
        ]
        sampled = np.repeat(np.arange(len(rows)), counts)
        tokens_after = np.cumsum(counts)[sampled] - 1 - np.arange(len(sampled))
        sampling_rows = rows[sampled]
        params = self.params.take(sampling_rows, axis=1)  # kernels need contiguous values
        query_start_loc, logits_indices, sent_rows, seeds, *sent_params = send(
            self.device,
            starts.astype(np.int32),
            starts[1:][sampled] - 1 - tokens_after,
            sampling_rows,
            self.seeds[sampling_rows],
            *params,
        )
        # `build` sets the positions. The rows are passed because they have the same shape.
        sampling = sampling_batch(sent_params, seeds, positions=sent_rows)
        is_random = params[0] > 0
        sampling.all_greedy = not is_random.any()
        for (name, off), values in zip(FILTERS.items(), params[1:], strict=True):
            if not (is_random & (values != off)).any():
                del sampling.filters[name]
        return StepBatch(
            # [] prevents `build` from reusing a step with chunks: a decode plan has rows.
            decode_rows=[] if chunks else plan.decode_rows,
            rows=rows,
            query_lens=query_lens,
            sampled=sampled,
            tokens_after=tokens_after,
            query_start_loc=query_start_loc,
            logits_indices=logits_indices,
            sampling_rows=sent_rows,
            sampling_batch=sampling,
            num_decodes=int((query_lens[::-1] == 1).cumprod().sum()),
        )


def sampling_batch(
    params: Tensor | list[Tensor], seeds: Tensor, positions: Tensor
) -> SamplingBatch:
    """Build a SamplingBatch. `params` has the temperature and each filter, as [R] float32."""
    temperature, *values = params
    pairs = zip(FILTERS.items(), values, strict=True)
    filters = {name: x.long() if isinstance(off, int) else x for (name, off), x in pairs}
    return SamplingBatch(temperature, seeds, positions, filters)
