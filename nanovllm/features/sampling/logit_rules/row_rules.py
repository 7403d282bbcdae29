"""Applies logit rules, such as penalties and masks, to the logits of rows before sampling.

A row without rules costs nothing. The rules of all rows of a step are applied together, in few
operations on the device and without waiting for it. Four kinds of rules need the sampled tokens on
the host: logits processors, grammars, bad words of several tokens, and budgets of thinking. A step
with such a row launches its forward pass and then waits for the tokens of the previous step, so the
rules run on the host while the device works.

A row with drafts (features/sampling/ngram.py) samples at several positions. Each of them has a copy
of the row's rules, whose output ends with the drafts before the position.

The order is the same as in transformers and vLLM: log-probabilities of the raw logits, allowed
tokens, bad words, minimum length, bias, penalties, logits processors, the end of thinking that a
budget forces, and last the grammar, which no other rule can override. The sampler follows. With
logprobs_mode="processed_logprobs", log-probabilities are computed after all this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.features.sampling.logit_rules.logprobs import LogprobsBatch
from nanovllm.features.sampling.logit_rules.penalties import Penalties, PenaltyState, has_penalties
from nanovllm.features.sampling.logit_rules.rules_of_row import RowRules
from nanovllm.models.backend import Backend
from nanovllm.models.batch import SamplingBatch
from nanovllm.models.sampler import MASKED
from nanovllm.models.transfers import start_copy, to_device
from nanovllm.plan import COMPLETE, Chunk, LogitRules, NewRow, StepOutput
from nanovllm.runner.model_runner import PendingOutput
from nanovllm.utils.host import explain_out_of_memory


class RulesState:
    """The rules of all rows, the state of their penalties, and a buffer for changed logits."""

    processed_logprobs = False  # set by loading/make_runner.py

    def __init__(self, num_rows: int, length: int, vocab_size: int, device: torch.device) -> None:
        self.sizes = num_rows, length, vocab_size
        self.device = device
        # [256, 8]: for each byte of a grammar's mask, the upper limits of the logits of its tokens.
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self.caps = to_device(np.where(bits, np.inf, MASKED).astype(np.float32), device)
        self.reset()

    def reset(self) -> None:
        """Forget all rules, and free the memory that they took."""
        self.penalties = PenaltyState(*self.sizes[:2], self.device)
        self.logits: Tensor | None = None  # [N, V] float32, from the first use on
        self.rows: dict[int, RowRules] = {}  # rules of the rows that have any
        self.last_batch: tuple[list[int], RulesBatch] | None = None  # of these rows

    def replace_row(self, new_row: NewRow) -> None:
        """Replace the rules of a row. The new sequence may have none."""
        row, rules = new_row.row, new_row.sampling.rules
        if row in self.rows or rules is not None:
            self.last_batch = None  # first, because Ctrl-C may interrupt this
            self.rows.pop(row, None)
        if rules is not None:
            try:
                if has_penalties(rules):
                    self.penalties.add_row(row, new_row.prompt, new_row.output)
                self.rows[row] = RowRules(rules, new_row)
            except Exception as error:
                failed = RowRules(LogitRules(), new_row)
                failed.error = error  # ends only this request, when the row samples
                failed.needs_output = True
                self.rows[row] = failed

    def replace_output(self, chunk: Chunk) -> None:
        """Replace the output of a row that has drafts, or had some, of which a part was wrong."""
        if (row := self.rows.get(chunk.row)) is None or chunk.output is None:
            return
        self.last_batch = None
        row.output = list(chunk.output)
        row.last = None
        row.drafts = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]
        if not row.drafts and has_penalties(row.rules):
            self.penalties.add_row(chunk.row, row.prompt, row.output)

    def batch(self, rows: list[int] | np.ndarray, positions: np.ndarray) -> RulesBatch | None:
        """Return the rules of `rows` as tensors, or None if no row has rules.

        `positions` [N] are the positions of all rows.
        """
        if not self.rows:
            return None
        numbers: list[int] = np.asarray(rows).tolist()
        if self.rows.keys().isdisjoint(numbers):
            return None
        if self.last_batch is None or self.last_batch[0] != numbers:
            rules = {row: self.rows[row].at_each_position() for row in self.rows.keys() & numbers}
            with_rules = [(i, rules[row].pop(0)) for i, row in enumerate(numbers) if row in rules]
            self.last_batch = numbers, RulesBatch(with_rules, self)
        batch = self.last_batch[1]
        batch.length = int(positions[batch.rows].max()) + 1
        return batch


class RulesBatch:
    """The rules of a step as tensors. Steps with the same rows share one RulesBatch."""

    def __init__(self, rows: list[tuple[int, RowRules]], state: RulesState) -> None:
        """`rows` has (index of the row's logits, rules) for each row with rules."""
        # Not `state`, which would form a cycle and keep the memory of an unused engine.
        device = state.device
        vocab_size = state.sizes[2]
        self.caps = state.caps
        self.rows = [row.row for _, row in rows]
        self.length = 0  # above the positions of all tokens to be sampled; set by RulesState
        self.host_rules = [(i, row) for i, row in rows if row.needs_output]
        # Results of the last `apply`: errors, and indices of logits with a complete grammar.
        self.errors: list[tuple[int, RowRules, Exception]] = []
        self.completed: list[int] = []

        def send(values: Any, dtype: Any = np.int64) -> Tensor:
            return to_device(np.array(values, dtype), device)

        # 1. Allowed tokens, as indices in the flat logits [R * V].
        allowed = [(i, row.allowed) for i, row in rows if row.allowed is not None]
        self.restricted = send([i for i, _ in allowed])
        indices = [ids + i * vocab_size for i, ids in allowed]
        self.allowed = send(np.concatenate(indices) if indices else [])
        # 2. Bad words, minimum length and bias: additions to single logits.
        edits = [(i * vocab_size + t, value, end) for i, row in rows for t, value, end in row.edits]
        self.edited = send([index for index, _, _ in edits])
        self.added = send([value for _, value, _ in edits], np.float32)
        self.until = send([end for _, _, end in edits])
        # 3. Penalties.
        penalized = [(i, row) for i, row in rows if has_penalties(row.rules)]
        known = [(i, row.row, row.rules) for i, row in penalized if row.drafts_before is None]
        self.penalties = [Penalties(known, state.penalties)] if known else []
        if with_drafts := [(i, row) for i, row in penalized if row.drafts_before is not None]:
            tokens = PenaltyState(len(with_drafts), state.sizes[1], device)
            for place, (_, row) in enumerate(with_drafts):
                tokens.add_row(place, row.prompt, row.output)
            places = [(i, place, row.rules) for place, (i, row) in enumerate(with_drafts)]
            self.penalties.append(Penalties(places, tokens))
        # 4. Log-probabilities.
        reported = [(i, row) for i, row in rows if row.rules.logprobs is not None]
        self.logprobs = LogprobsBatch(reported, state) if reported else None
        self.changes_logits = bool(allowed or edits or penalized or self.host_rules)
        if self.changes_logits and state.logits is None:
            with explain_out_of_memory("out of memory for changed logits; lower max_num_seqs"):
                state.logits = torch.empty(state.sizes[::2], dtype=torch.float32, device=device)
        self.logits = state.logits

    def apply(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return logits [R, V] with the rules applied, in float32. The next call overwrites them.

        `positions` [R] are the positions of the tokens to be sampled.
        """
        assert self.logits is not None  # there are rules that change logits
        if len(self.logits) < len(logits):  # a row with drafts has several
            self.logits = torch.empty_like(logits, dtype=torch.float32)
        logits = self.logits[: len(logits)].copy_(logits)
        flat = logits.view(-1)
        if len(self.restricted):
            kept = flat[self.allowed]
            logits.index_fill_(0, self.restricted, MASKED)
            flat[self.allowed] = kept
        if len(self.edited):
            active = positions[self.edited // logits.shape[1]] < self.until
            flat.index_add_(0, self.edited, torch.where(active, self.added, 0.0))
        for penalties in self.penalties:
            penalties.apply(logits, positions, self.length)
        if self.host_rules:
            self._apply_on_host(logits)
        return logits

    def _apply_on_host(self, logits: Tensor) -> None:
        """Apply the rules that need output tokens, in place, to logits [R, V]."""
        for _, row in self.host_rules:
            if row.last is not None:
                token_ids, i = row.last
                row.output.append(token_ids()[i])
                row.last = None
        self.errors, self.completed = [], []
        num_bytes = -(-logits.shape[1] // 8)
        masks = np.full((len(logits), num_bytes), 0xFF, np.uint8)  # a bit of 0 masks a token
        for i, row in self.host_rules:
            try:
                row.apply(logits[i])
                if (mask := row.mask()) is not None:
                    masks[i] = np.frombuffer(mask, np.uint8, num_bytes)
                    if row.must_end():
                        self.completed.append(i)
                        logits[i].fill_(MASKED)
            except Exception as error:  # of a processor or grammar; it ends only this request
                self.errors.append((i, row, error))
                logits[i].fill_(MASKED)
        if any(row.matcher for _, row in self.host_rules):
            # On a CPU, masked_fill takes several times as long.
            index = to_device(masks, logits.device).int().flatten()
            caps = self.caps.index_select(0, index).view(len(logits), -1)
            torch.minimum(logits, caps[:, : logits.shape[1]], out=logits)

    def sample(
        self,
        logits: Tensor,
        sampling: SamplingBatch,
        backend: Backend,
        record: Callable[[Tensor], Tensor],
    ) -> PendingOutput:
        """Sample from logits [R, V] with the rules applied. `record` is Rows.record for R rows."""
        changed = self.apply(logits, sampling.positions) if self.changes_logits else logits
        tokens = backend.sample(changed, sampling)
        output = PendingOutput(start_copy(tokens))
        tokens = record(tokens)
        if self.changes_logits:
            self.append(tokens, output.token_ids)
            errors, completed = self.errors, self.completed
            self.errors = []  # which keep logits processors in memory

            def add_to(done: StepOutput) -> None:
                for i, row, error in errors:
                    before = row.drafts_before or []
                    # After a wrong draft, no token is taken from here.
                    if done.token_ids[i - len(before) : i] == before:
                        done.errors[row.row] = error
                for i in completed:
                    done.token_ids[i] = COMPLETE

            output.results.append(add_to)
        if self.logprobs is not None:
            output.results.append(self.logprobs.start(logits, changed, sampling, tokens, backend))
        return output

    def append(self, tokens: Tensor, token_ids: Callable[[], list[int]]) -> None:
        """Add the tokens [R] that were sampled from the logits of `apply`.

        `token_ids` waits for the device and returns the tokens. Rules on the host call it in the
        next step.
        """
        for penalties in self.penalties:
            penalties.append(tokens)
        token_ids = functools.cache(token_ids)  # one list for all rows
        for i, row in self.host_rules:
            row.last = token_ids, i
