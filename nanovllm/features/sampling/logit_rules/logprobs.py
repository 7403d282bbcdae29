"""The log-probabilities that rows of a step report: of most likely, sampled and named tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.models.backend import Backend
from nanovllm.models.batch import SamplingBatch
from nanovllm.models.raw_logprobs import token_logprobs
from nanovllm.models.sampler import filtered_logits
from nanovllm.models.transfers import start_copy, to_device
from nanovllm.plan import StepOutput
from nanovllm.runner.chunk_results import unpack_logprobs

if TYPE_CHECKING:
    from nanovllm.features.sampling.logit_rules.row_rules import RulesState
    from nanovllm.features.sampling.logit_rules.rules_of_row import RowRules


class LogprobsBatch:
    """What Q rows of a step report."""

    def __init__(self, rows: list[tuple[int, RowRules]], state: RulesState) -> None:
        """`rows` has (index of the row's logits, rules) for each row with `logprobs`."""
        self.rows = rows
        self.processed = state.processed_logprobs
        self.index = to_device(np.array([i for i, _ in rows], np.int64), state.device)
        self.most = max(row.rules.logprobs or 0 for _, row in rows)
        ids = [row.rules.logprob_token_ids for _, row in rows]
        named = [(i, token) for i, tokens in enumerate(ids) for token in tokens]
        # [2, N]: an index in `rows`, and a token.
        self.named = to_device(np.array(named, np.int64).reshape(-1, 2).T.copy(), state.device)

    def start(
        self, raw: Tensor, changed: Tensor, batch: SamplingBatch, tokens: Tensor, backend: Backend
    ) -> Callable[[StepOutput], None]:
        """Start to copy the log-probabilities of `tokens` [R] to the host.

        `raw` and `changed` [R, V] are the logits before and after the rules. Returns a function
        that waits for the copies and adds them to the output of the step.
        """
        logits, score = raw, backend.token_logprobs
        if self.processed:
            logits, score = changed, token_logprobs  # kernels expect that no token is masked
        if len(self.index) < len(tokens):
            logits, tokens = logits[self.index], tokens[self.index]
        if self.processed:
            filters = {name: values[self.index] for name, values in batch.filters.items()}
            batch = replace(batch, temperature=batch.temperature[self.index], filters=filters)
            logits = processed_logits(logits, batch, tokens)
        logprobs = start_copy(score(logits, tokens, self.most))
        # In parts, because each token takes a copy of its row's logits.
        pairs = self.named.split(64, dim=1) if self.named.numel() else ()
        named = [start_copy(score(logits[i], ids, 0)) for i, ids in pairs]

        def add_to(done: StepOutput) -> None:
            of_named = (packed for part in named for packed in part())
            for (i, row), packed in zip(self.rows, logprobs(), strict=True):
                rules = row.rules
                entry = unpack_logprobs(packed, done.token_ids[i], rules.logprobs or 0)
                # The ids are the first argument, so that zip takes no result after the last id.
                ids = zip(rules.logprob_token_ids, of_named, strict=False)
                known = {token for token, *_ in entry}
                entry += [(t, p, int(rank)) for t, (p, rank) in ids if t not in known]
                done.result(row.row).logprobs.append(entry)

        return add_to


def processed_logits(logits: Tensor, batch: SamplingBatch, tokens: Tensor) -> Tensor:
    """Return the logits [Q, V] float32 of the distributions from which `tokens` [Q] were drawn.

    `logits` [Q, V] are those after the rules. Filtered tokens are MASKED. As in vLLM, temperature
    and filters do not apply to greedy rows. The filter top-k waits for the device.
    """
    scaled = filtered_logits(logits, replace(batch, filters={}))
    filtered = filtered_logits(logits, batch)
    # A kernel that rounds otherwise may have kept a token at the limit of top-p or min-p.
    drawn = tokens[:, None]
    filtered = filtered.scatter(1, drawn, scaled.gather(1, drawn))
    return torch.where(batch.temperature[:, None] == 0, logits.float(), filtered)
