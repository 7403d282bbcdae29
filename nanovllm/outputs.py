"""The results of requests. They are values only, made by the engine.

A result can be read as in vLLM (`out.outputs[0].text`) and as in nano-vllm (`out["text"]`).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position, before temperature and all rules."""

    logprob: float  # natural logarithm
    rank: int  # 1 is the most likely token
    decoded_token: str | None  # None without a tokenizer


@dataclass(frozen=True)
class CompletionOutput:
    index: int
    text: str  # "" without a tokenizer or with detokenize=False
    token_ids: list[int]  # including the stop token, if one ended the output
    finish_reason: str | None  # "stop", "length" or "abort"
    stop_reason: int | str | None = None  # a string or token id; None for an end-of-sequence token
    logprobs: list[dict[int, Logprob]] | None = None  # one dict per output token, if requested
    cumulative_logprob: float | None = None  # sum over output tokens, if logprobs were requested


@dataclass(frozen=True)
class StreamOutput:
    """What is new in one sample of one request."""

    request_index: int  # among the prompts of the call
    index: int  # among the samples of the prompt
    text: str
    token_ids: list[int]
    finish_reason: str | None  # None until the last output; then "stop", "length" or "abort"


@dataclass
class RequestMetrics:
    """Seconds on the clock of time.monotonic; None for what has not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_in_queue(self) -> float | None:
        if self.first_scheduled_time is None:
            return None
        return self.first_scheduled_time - self.arrival_time


@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None  # None if only token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # prompt tokens whose KV was in the prefix cache
    # None for the first token. An aborted request has those of the tokens that were computed.
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    metrics: RequestMetrics = field(compare=False)

    def __getitem__(self, key: str) -> str | list[int]:
        """Return "text" or "token_ids" of the first output, as in nano-vllm."""
        if key == "text":
            return self.outputs[0].text
        if key == "token_ids":
            return self.outputs[0].token_ids
        raise KeyError(f"{key!r}; a RequestOutput has 'text' and 'token_ids'")
