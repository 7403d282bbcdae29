"""The output of a step that the device may still be computing."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanovllm.models.logprobs import likely_tokens, unpack_logprobs
from nanovllm.plan import COMPLETE, Chunk, RowResult, StepOutput


def start_copy(tensor: Tensor) -> Callable[[], Any]:
    """Start a copy to the host. The returned function waits for it and returns a list."""
    if tensor.device.type != "cuda":
        return tensor.clone().tolist  # a copy, because the next replay of a graph may overwrite it
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Any:
        copied.synchronize()
        return host.tolist()

    return wait


@dataclass(slots=True)
class PendingOutput:
    """The output of a step, as functions that wait for copies from the device."""

    token_ids: Callable[[], list[int]] = list  # `list` returns no tokens
    hidden_rows: list[int] = field(default_factory=list)
    hidden_states: Callable[[], list[list[float]]] = list  # of `hidden_rows`
    candidate_rows: list[tuple[int, int]] = field(default_factory=list)  # (row, k): k candidates
    candidates: Callable[[], list[list[float]]] = list  # log-probabilities, then token ids
    # (index in token_ids, row, number of log-probabilities). `logprobs` returns the results of
    # token_logprobs for these tokens.
    reported: list[tuple[int, int, int]] = field(default_factory=list)
    logprobs: Callable[[], list[list[float]]] = list
    errors: dict[int, Exception] = field(default_factory=dict)  # as in StepOutput
    # Indices in token_ids of the rows whose grammar is complete.
    completed: list[int] = field(default_factory=list)
    # Chunks with targets. The functions in `prompt_parts` together return the results of
    # token_logprobs for the targets of all these chunks.
    scored_chunks: list[Chunk] = field(default_factory=list)
    prompt_parts: list[Callable[[], list[list[float]]]] = field(default_factory=list)

    def wait(self) -> StepOutput:
        token_ids = self.token_ids()
        for i in self.completed:
            token_ids[i] = COMPLETE
        results: dict[int, RowResult] = defaultdict(RowResult)
        for row, hidden_state in zip(self.hidden_rows, self.hidden_states(), strict=True):
            results[row].hidden_state = hidden_state
        for (row, k), packed in zip(self.candidate_rows, self.candidates(), strict=True):
            results[row].candidates = likely_tokens(packed, k)
        for (i, row, k), packed in zip(self.reported, self.logprobs(), strict=True):
            results[row].logprobs = unpack_logprobs(packed, token_ids[i], k)
        all_packed = (packed for part in self.prompt_parts for packed in part())
        for chunk in self.scored_chunks:
            # The targets are the first argument, so that zip takes no result after the last target.
            entries = zip(chunk.logprob_targets, all_packed, strict=False)
            result = results[chunk.row]
            k = chunk.num_logprobs
            result.prompt_logprobs = [unpack_logprobs(p, token, k) for token, p in entries]
            result.first_position = chunk.start + chunk.logprobs_from + 1
        return StepOutput(token_ids, results, self.errors)
