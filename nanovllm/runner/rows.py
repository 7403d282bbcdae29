"""Rows: the runner's data about each running sequence, and the batches that are built from it.

Every running sequence has a row (vLLM: `InputBatch`). The data is in host arrays, except the last
sampled tokens. On a GPU, runner/device_runner.py has the same arrays and builds the decode steps.

    rows   [ 4 | 0 | 7 | N ]   a decode of 3 rows, padded to the captured size of 4
             |   |   |   `--- row N is padding: its block table is the null block, its position 0
             v   v   v
    last token, position, block table and sampling of each row  ->  one ForwardBatch, SamplingBatch
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """A plan as tensors. R tokens are sampled."""

    forward_batch: ForwardBatch
    logits_indices: Tensor  # [R] int64, the tokens whose logits are sampled
    sampling_rows: Tensor  # [R] int64
    sampling_batch: SamplingBatch
    rules: RulesBatch | None  # if a row that samples has rules


class Rows:
    rules: RulesState | None = None  # set by loading/make_runner.py

    def __init__(
        self, num_rows: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        """Allocate N = `num_rows` rows. A sequence has at most B = `max_blocks` blocks."""
        self.num_rows, self.block_size, self.device = num_rows, block_size, device
        self.block_tables = np.zeros((num_rows + 1, max_blocks), np.int32)
        self.positions = np.zeros(num_rows + 1, np.int64)  # of the next token to compute
        # The temperature and each filter; the padding row is greedy and has no filters.
        self.params = np.zeros((1 + len(FILTERS), num_rows + 1), np.float32)
        self.params[1:, num_rows] = list(FILTERS.values())
        self.seeds = np.zeros(num_rows + 1, np.int64)
        # The last sampled tokens [N + 1], on the device only: the host may not have them yet.
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Apply the new rows and new blocks of a plan, and advance the positions of its rows."""
        for new_row in plan.new_rows:
            row, table = new_row.row, new_row.block_table
            sampling = new_row.sampling
            self.block_tables[row, : len(table)] = table
            self.block_tables[row, len(table) :] = 0
            self.params[:, row] = (sampling.temperature, *sampling.filters)
            self.seeds[row] = sampling.seed
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
        """Build the batch of a plan of S sequences, decodes last. Call `apply` first."""
        chunks = plan.chunks
        num_chunks = len(chunks)
        rows = np.array([*(c.row for c in chunks), *plan.decode_rows], np.int64)  # [S]
        context_lens = self.positions[rows]
        query_lens = np.ones(len(rows), np.int64)
        # A decode computes only its last position.
        positions, token_rows = context_lens - 1, rows  # [T]
        counts = np.ones(len(rows), np.int64)  # tokens that each sequence samples
        if chunks:
            query_lens[:num_chunks] = [len(c.token_ids) for c in chunks]
            spans = [np.arange(c.start, c.start + len(c.token_ids)) for c in chunks]
            positions = np.concatenate((*spans, positions[num_chunks:]))
            token_rows = np.repeat(rows, query_lens)
            counts[:num_chunks] = [
                1 + c.num_drafts if c.result_kind is ResultKind.TOKEN else 0 for c in chunks
            ]
        starts = np.concatenate(([0], np.cumsum(query_lens)))
        sampled = np.repeat(np.arange(len(rows)), counts)  # [R], the sequence of each sampled token
        # [R], the number of drafts that follow each in its sequence
        tokens_after = np.cumsum(counts)[sampled] - 1 - np.arange(len(sampled))
        sampling_rows = rows[sampled]
        params = self.params.take(sampling_rows, axis=1)  # kernels need contiguous values
        (
            query_start_loc,
            chunk_tokens,
            sent_positions,
            slots,
            lens,
            tables,
            logits_indices,
            sent_rows,
            seeds,
            sampling_positions,
            *sent_params,
        ) = send(
            self.device,
            starts.astype(np.int32),
            np.array([token for c in chunks for token in c.token_ids], np.int64),
            positions,
            self.slots(token_rows, positions),
            context_lens,
            self.block_tables[:, : -(-int(context_lens.max()) // self.block_size)][rows],
            starts[1:][sampled] - 1 - tokens_after,
            sampling_rows,
            self.seeds[sampling_rows],
            context_lens[sampled] - tokens_after,
            *params,
        )
        last = self.last_tokens[sent_rows[len(sent_rows) - len(plan.decode_rows) :]]
        forward = ForwardBatch(
            input_ids=torch.cat((chunk_tokens, last)) if chunks else last,
            positions=sent_positions,
            slot_mapping=slots,
            query_start_loc=query_start_loc,
            context_lens=lens,
            block_tables=tables,
            query_lens=query_lens,
            host_lens=context_lens,
            # Consecutive one-token sequences at the end, chunks included.
            num_decodes=int((query_lens[::-1] == 1).cumprod().sum()),
        )
        sampling = sampling_batch(sent_params, seeds, sampling_positions)
        is_random = params[0] > 0
        sampling.all_greedy = not is_random.any()
        for (name, off), values in zip(FILTERS.items(), params[1:], strict=True):
            if not (is_random & (values != off)).any():
                del sampling.filters[name]
        return StepBatch(forward, logits_indices, sent_rows, sampling, self.rules_of(sampling_rows))

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


def sampling_batch(
    params: Tensor | list[Tensor], seeds: Tensor, positions: Tensor
) -> SamplingBatch:
    """Build a SamplingBatch. `params` has the temperature and each filter, as [R] float32."""
    temperature, *values = params
    pairs = zip(FILTERS.items(), values, strict=True)
    filters = {name: x.long() if isinstance(off, int) else x for (name, off), x in pairs}
    return SamplingBatch(temperature, seeds, positions, filters)
