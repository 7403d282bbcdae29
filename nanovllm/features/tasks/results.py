"""The results of beam searches, embeddings, log-likelihoods and scores.

nanovllm exports these classes, so this file imports no code of their tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nanovllm.outputs import RequestMetrics


@dataclass
class BeamSearchSequence:
    """One result of a beam search."""

    tokens: list[int]  # prompt and output
    cum_logprob: float  # sum of the log-probabilities of output tokens, not normalized
    # "stop", "length", "abort", or "error" if the model computed NaN
    finish_reason: str | None
    stop_reason: int | str | None = None
    text: str | None = None  # of `tokens`; None without a tokenizer


@dataclass
class BeamSearchOutput:
    """The results of one prompt, the best first: `beam_width`, or fewer if no more are found."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]  # empty if the request was aborted or failed


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The result of a request for an embedding."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool
    num_cached_tokens: int  # prompt tokens whose KV was in the prefix cache
    metrics: RequestMetrics = field(compare=False)


@dataclass(frozen=True)
class LoglikelihoodOutput:
    """Log-likelihood of a continuation after its prompt, before temperature and all rules."""

    logprob: float  # natural logarithm, the sum of `token_logprobs`
    # Whether at each position no token is more likely than the token of the continuation.
    is_greedy: bool
    token_logprobs: list[float]
    token_ids: list[int]  # of the continuation
    num_cached_tokens: int  # tokens whose KV was in the prefix cache
    request_id: str


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The score of one pair of texts, with vLLM's fields."""

    request_id: str
    prompt_token_ids: list[int]  # of the pair
    outputs: ScoringOutput
    finished: bool
    num_cached_tokens: int  # prompt tokens whose KV was in the prefix cache
