"""Results of chunks other than tokens: hidden states, beam candidates, prompt log-probabilities."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanovllm.models.backend import Backend, FusedModel
from nanovllm.models.transfers import to_device
from nanovllm.plan import Chunk, ResultKind
from nanovllm.runner.pending import PendingOutput, start_copy
from nanovllm.runner.rows import Rows


def add_chunk_results(
    output: PendingOutput,
    chunks: list[Chunk],
    hidden: Tensor,
    rows: Rows,
    model: FusedModel,
    backend: Backend,
) -> None:
    """Add to `output` the hidden states, candidates and prompt log-probabilities of chunks.

    `hidden` [T, E] has the hidden states of the step. `model` maps them to logits.
    """
    end = 0
    hidden_index, candidate_index = [], []  # indices of tokens in the step
    scored: list[tuple[int, int]] = []  # (index of the token before the target, target)
    for chunk in chunks:
        start, end = end, end + len(chunk.token_ids)
        if targets := chunk.logprob_targets:
            output.scored_chunks.append(chunk)
            scored += enumerate(targets, start + chunk.logprobs_from)
        if chunk.result_kind is ResultKind.HIDDEN_STATE:
            output.hidden_rows.append(chunk.row)
            hidden_index.append(end - 1)
        elif chunk.result_kind is ResultKind.CANDIDATES:
            output.candidate_rows.append((chunk.row, chunk.num_candidates))
            candidate_index.append(end - 1)
    if scored:
        max_k = max(chunk.num_logprobs for chunk in output.scored_chunks)
        # The memory profile does not include the logits of a whole chunk, so they are in parts.
        for part in to_device(np.transpose(scored).copy(), hidden.device).split(64, dim=1):
            index, targets_of_part = part
            packed = backend.token_logprobs(model.logits(hidden[index]), targets_of_part, max_k)
            output.prompt_parts.append(start_copy(packed))
    if candidate_index:
        last = hidden[to_device(np.array(candidate_index), hidden.device)]
        find_candidates(output, model.logits(last), rows, backend)
    if hidden_index:
        last = hidden[to_device(np.array(hidden_index), hidden.device)]
        output.hidden_states = start_copy(last.float())


def find_candidates(output: PendingOutput, logits: Tensor, rows: Rows, backend: Backend) -> None:
    """Add the most likely tokens of `output.candidate_rows` [C], from logits [C, V].

    Tokens that rules mask are not candidates. The log-probabilities of the others do not change.
    """
    k = max(k for _, k in output.candidate_rows)
    candidate_rows = [row for row, _ in output.candidate_rows]
    rules = rows.rules_of(candidate_rows)
    if rules is not None and rules.changes_logits:
        positions = to_device(rows.positions[candidate_rows], logits.device)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        values, ids = rules.apply(logprobs, positions).topk(k)
        packed = torch.cat((values.double(), ids), dim=1)
        output.errors |= rules.errors
        rules.errors = {}
    else:
        any_token = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        packed = backend.token_logprobs(logits, any_token, k)[:, 2:]
    output.candidates = start_copy(packed)
