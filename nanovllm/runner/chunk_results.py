"""Results of chunks other than tokens: hidden states, beam candidates, prompt log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from nanovllm.models.batch import to_device
from nanovllm.plan import Chunk, ResultKind
from nanovllm.runner.pending import PendingOutput, start_copy
from nanovllm.runner.rows import Rows

Logits: TypeAlias = Callable[[Tensor], Tensor]  # of the model, from hidden states
TokenLogprobs: TypeAlias = Callable[[Tensor, Tensor, int], Tensor]  # of the backend


def add_chunk_results(
    output: PendingOutput,
    chunks: list[Chunk],
    hidden: Tensor,
    rows: Rows,
    logits_of: Logits,
    token_logprobs: TokenLogprobs,
) -> None:
    """Add to `output` the hidden states, candidates and prompt log-probabilities of chunks.

    hidden: the hidden states [T, E] of the step.
    """
    start, wanted, candidates = 0, [], []
    scored: list[tuple[int, int]] = []  # (index of the token before the target, target)
    for chunk in chunks:
        if targets := chunk.logprob_targets:
            rules = rows.rules.get(chunk.row)
            k = (rules and rules.rules.prompt_logprobs) or 0
            output.prompts.append((chunk, k))
            scored += enumerate(targets, start + chunk.logprobs_from)
        start += len(chunk.token_ids)
        if chunk.result_kind is ResultKind.HIDDEN_STATE:
            output.hidden_rows.append(chunk.row)
            wanted.append(start - 1)
        elif chunk.result_kind is ResultKind.CANDIDATES:
            output.candidate_rows.append((chunk.row, chunk.num_candidates))
            candidates.append(start - 1)
    if scored:
        max_k = max(k for _, k in output.prompts)
        # In parts, because the memory profile does not include the logits of a whole chunk.
        for part in to_device(np.transpose(scored).copy(), hidden.device).split(64, dim=1):
            logits = logits_of(hidden[part[0]])
            packed = token_logprobs(logits, part[1], max_k)
            output.prompt_parts.append(start_copy(packed))
    if candidates:
        last = hidden[to_device(np.array(candidates), hidden.device)]
        find_candidates(output, last, rows, logits_of, token_logprobs)
    if wanted:
        index = to_device(np.array(wanted), hidden.device)
        output.hidden_states = start_copy(hidden[index].float())


def find_candidates(
    output: PendingOutput,
    hidden: Tensor,
    rows: Rows,
    logits_of: Logits,
    token_logprobs: TokenLogprobs,
) -> None:
    """Add the most likely tokens of `output.candidate_rows` [C], from hidden states [C, E].

    Tokens that rules mask are not candidates. The other log-probabilities do not change.
    """
    k = max(k for _, k in output.candidate_rows)
    candidate_rows = [row for row, _ in output.candidate_rows]
    logits, rules = logits_of(hidden), rows.with_rules(candidate_rows)
    if rules is not None and rules.changes_logits:
        positions = to_device(rows.positions[candidate_rows], hidden.device)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        values, ids = rules.apply(logprobs, positions).topk(k)
        packed = torch.cat((values.double(), ids), dim=1)
        output.errors, rules.errors = output.errors | rules.errors, {}
    else:
        none = torch.zeros(len(candidate_rows), dtype=torch.int64, device=hidden.device)
        packed = token_logprobs(logits, none, k)[:, 2:]
    output.candidates = start_copy(packed)
