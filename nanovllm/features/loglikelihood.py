"""Log-likelihoods: what a request asks for, how text is split into tokens, and the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nanovllm.api.outputs import Logprob


@dataclass(frozen=True)
class ScoringParams:
    """A request for the log-probabilities of the last tokens of its prompt, the continuation."""

    num_tokens: int  # of the continuation; at least one token is before them


@dataclass(frozen=True)
class LoglikelihoodOutput:
    """How likely a continuation is after its prompt, before temperature and all rules."""

    logprob: float  # natural logarithm, the sum of `token_logprobs`
    # Whether no token is more likely than that of the continuation, at each position.
    is_greedy: bool
    token_logprobs: list[float]
    token_ids: list[int]  # of the continuation
    num_cached_tokens: int  # tokens whose KV was in the prefix cache
    request_id: str


def check_logprobs(entries: list[Logprob]) -> None:
    if any(math.isnan(entry.logprob) for entry in entries):
        raise ArithmeticError("there is no log-likelihood: the model computed NaN")


def encode_pair(
    text: str, continuation: str, encode: Callable[[str], list[int]]
) -> tuple[list[int], list[int]]:
    """Return the tokens of `text`, and those that `continuation` adds to it.

    As `_encode_pair` of lm_eval does, spaces at the end of the text belong to the continuation,
    whose tokens are those that follow the text's when both are encoded together.
    """
    stem = text.rstrip()
    ids = encode(stem) if stem else []
    return ids, encode(text + continuation)[len(ids) :]
