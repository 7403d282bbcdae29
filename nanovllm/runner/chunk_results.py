"""Results of chunks other than tokens: hidden states, beam candidates, prompt log-probabilities.

Each function starts a copy of its results to the host, and adds to the PendingOutput a function
that waits for this copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.models.raw_logprobs import most_likely
from nanovllm.models.transfers import start_copy, to_device
from nanovllm.plan import Chunk, ResultKind, StepOutput, TokenLogprobs

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner, PendingOutput


def add_chunk_results(
    output: PendingOutput, chunks: list[Chunk], hidden: Tensor, runner: ModelRunner
) -> None:
    """Add to `output` the other results of chunks, from the hidden states [T, E] of the step."""
    ends = np.cumsum([len(chunk.token_ids) for chunk in chunks])
    if any(chunk.logprob_targets for chunk in chunks):
        add_prompt_logprobs(output, chunks, hidden, runner)
    for kind in (ResultKind.CANDIDATES, ResultKind.HIDDEN_STATE):
        index = [i for i, chunk in enumerate(chunks) if chunk.result_kind is kind]
        if not index:
            continue
        last = hidden[to_device(ends[index] - 1, hidden.device)]
        of_kind = [chunks[i] for i in index]
        if kind is ResultKind.CANDIDATES:
            add_candidates(output, of_kind, last, runner)
        else:
            add_hidden_states(output, of_kind, last)


def add_hidden_states(output: PendingOutput, chunks: list[Chunk], hidden: Tensor) -> None:
    """Add the hidden states [C, E] of the last tokens of C chunks."""
    hidden_states = start_copy(hidden.float())

    def add_to(done: StepOutput) -> None:
        for chunk, hidden_state in zip(chunks, hidden_states(), strict=True):
            done.result(chunk.row).hidden_state = hidden_state

    output.results.append(add_to)


def add_candidates(
    output: PendingOutput, chunks: list[Chunk], hidden: Tensor, runner: ModelRunner
) -> None:
    """Add the most likely tokens after C chunks, from hidden states [C, E] of the last tokens.

    Tokens that rules mask are not candidates. The log-probabilities of the others do not change.
    """
    logits = runner.fused_model.logits(hidden)
    k = max(chunk.num_candidates for chunk in chunks)
    candidate_rows = [chunk.row for chunk in chunks]
    rules = runner.rows.rules_of(candidate_rows)
    errors: dict[int, Exception] = {}
    any_token = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    packed = runner.backend.token_logprobs(logits, any_token, k)[:, 2:]
    if rules is not None and rules.changes_logits:
        positions = to_device(runner.rows.positions[candidate_rows], logits.device)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        values, ids = most_likely(rules.apply(logprobs, positions), k)
        # Rows without rules keep their candidates, which do not depend on the rules of other rows.
        has_rules = to_device(np.isin(candidate_rows, rules.rows)[:, None], logits.device)
        packed = torch.where(has_rules, torch.cat((values.double(), ids), dim=1), packed)
        errors = {row.row: error for _, row, error in rules.errors}
        rules.errors = []
    candidates = start_copy(packed)

    def add_to(done: StepOutput) -> None:
        done.errors |= errors
        for chunk, each in zip(chunks, candidates(), strict=True):
            done.result(chunk.row).candidates = likely_tokens(each, chunk.num_candidates)

    output.results.append(add_to)


def add_prompt_logprobs(
    output: PendingOutput, chunks: list[Chunk], hidden: Tensor, runner: ModelRunner
) -> None:
    """Add the log-probabilities of the targets of chunks, from the hidden states of the step."""
    scored: list[tuple[int, int]] = []  # the token before each target, in the step, and the target
    start = 0
    for chunk in chunks:
        scored += enumerate(chunk.logprob_targets, start + chunk.logprobs_from)
        start += len(chunk.token_ids)
    max_k = max(chunk.num_logprobs for chunk in chunks)
    # The memory profile does not include the logits of a whole chunk, so they are in parts.
    parts = to_device(np.transpose(scored).copy(), hidden.device).split(64, dim=1)
    copies = []
    for index, targets in parts:
        logits = runner.fused_model.logits(hidden[index])
        copies.append(start_copy(runner.backend.token_logprobs(logits, targets, max_k)))

    def add_to(done: StepOutput) -> None:
        all_packed = (packed for copy in copies for packed in copy())
        for chunk in chunks:
            if not (targets := chunk.logprob_targets):
                continue
            result = done.result(chunk.row)
            k = chunk.num_logprobs
            # The targets are the first argument, so that zip takes no result after the last target.
            entries = zip(targets, all_packed, strict=False)
            result.prompt_logprobs = [unpack_logprobs(p, token, k) for token, p in entries]
            result.first_position = chunk.start + chunk.logprobs_from + 1

    output.results.append(add_to)


def unpack_logprobs(packed: list[float], token: int, k: int) -> TokenLogprobs:
    """Unpack a row of `token_logprobs` to (token, log-probability, rank), for `token` first."""
    logprob, rank = packed[:2]
    likely = enumerate(likely_tokens(packed[2:], k), start=1)
    others = [(other, p, i) for i, (other, p) in likely if other != token]
    return [(token, logprob, int(rank)), *others]


def likely_tokens(packed: list[float], k: int) -> list[tuple[int, float]]:
    """Return (token, log-probability) of the first k from n log-probabilities and n token ids."""
    half = len(packed) // 2
    return list(zip(map(int, packed[half : half + k]), packed[:k], strict=True))
