"""What a request gives back. Values only; the engine fills them in when the request ends.

A result reads as vLLM's (`out.outputs[0].text`) and as nano-vllm's (`out["text"]`).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """Of one token at one place, in the distribution before temperature and every rule."""

    logprob: float  # natural logarithm
    rank: int  # 1 is the likeliest
    decoded_token: str | None  # None where the engine has no tokenizer


@dataclass(frozen=True)
class CompletionOutput:
    index: int
    text: str  # "" where there is no tokenizer, or detokenize=False
    token_ids: list[int]  # with the stop token, if one ended it
    finish_reason: str | None  # "stop" or "length"; in a stream also "abort", by abort_request
    stop_reason: int | str | None = None  # the string or token id that ended it; None for an eos
    logprobs: list[dict[int, Logprob]] | None = None  # one dict a token, if asked for
    cumulative_logprob: float | None = None  # of all tokens, if logprobs were asked for


@dataclass(frozen=True)
class StreamOutput:
    """What is new of one sample of one request."""

    request_index: int  # among the prompts of the call
    index: int  # among the samples of the prompt
    text: str
    token_ids: list[int]
    finish_reason: str | None  # None until the last


@dataclass
class RequestMetrics:
    """Seconds on time.monotonic's clock; None for what has not happened."""

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
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # prompt tokens that the prefix cache held
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # None for the first token
    metrics: RequestMetrics = field(compare=False)

    def __getitem__(self, key: str) -> str | list[int]:
        """nano-vllm's form: out["text"], out["token_ids"] of the first output."""
        if key == "text":
            return self.outputs[0].text
        if key == "token_ids":
            return self.outputs[0].token_ids
        raise KeyError(f"{key!r}; a RequestOutput has 'text' and 'token_ids'")
