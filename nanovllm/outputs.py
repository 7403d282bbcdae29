"""The results of requests.

A result can be read as in vLLM (`out.outputs[0].text`) and as in nano-vllm (`out["text"]`).
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position; see the option logprobs_mode of LLM."""

    logprob: float  # natural logarithm
    rank: int  # 1 is the most likely token
    decoded_token: str | None  # None without a tokenizer or with detokenize=False


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a prompt."""

    index: int  # among the samples of the prompt
    text: str  # without the stop token or string; "" without a tokenizer or detokenize=False
    token_ids: list[int]  # including the stop token, if one ended the output
    finish_reason: str | None  # "stop", "length", "repetition", "abort" or "error"
    stop_reason: int | str | None = None  # a string or token id; None for an end-of-sequence token
    logprobs: list[dict[int, Logprob]] | None = None  # one dict per output token, if requested
    cumulative_logprob: float | None = None  # sum over output tokens, if logprobs were requested
    reasoning: str | None = None  # the thinking, with the option reasoning_parser


@dataclass(frozen=True)
class StreamOutput:
    """The new text and tokens of one sample of one request."""

    request_index: int  # among the prompts of the call
    index: int  # among the samples of the prompt
    text: str
    token_ids: list[int]
    finish_reason: str | None  # None until the last output; then as in CompletionOutput
    stop_reason: int | str | None = None  # as in CompletionOutput
    logprobs: list[dict[int, Logprob]] | None = None  # one dict per token of token_ids
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # in the first of sample 0
    reasoning: str = ""  # the new text of the thinking


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the clock of time.monotonic; None for events that have not happened."""

    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True)
class RequestOutput(Mapping[str, Any]):
    """The result of one request. As a mapping it is nano-vllm's dict of the first output."""

    request_id: str
    prompt: str | None  # None if only token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # prompt tokens whose KV was in the prefix cache
    metrics: RequestMetrics = field(compare=False)
    # None for the first token. An aborted request has entries for its computed tokens only.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def __getitem__(self, key: str) -> Any:
        if key not in NANO_VLLM_KEYS:
            raise KeyError(f"{key!r}; a RequestOutput has 'text' and 'token_ids'")
        return getattr(self.outputs[0], key)

    def __iter__(self) -> Iterator[str]:
        return iter(NANO_VLLM_KEYS)

    def __len__(self) -> int:
        return len(NANO_VLLM_KEYS)


NANO_VLLM_KEYS = ("text", "token_ids")
