"""SamplingParams: how the tokens of one request are drawn and when it ends.

Owns: the values, checked when they are built. Given: keyword arguments with vLLM's names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from nanovllm.config import check_int, unknown_name

# (token ids so far: prompt and output, logits [V] float32) -> logits [V]. Called on the device's
# tensor for each token of the request, after all other rules and before the temperature.
LogitsProcessor: TypeAlias = "Callable[[list[int], Any], Any]"

# Fields that vLLM has and we do not, and what does their work here.
ELSEWHERE = {
    "best_of": "ask for n samples and choose among them by cumulative_logprob",
    "use_beam_search": "there is no beam search yet; ask for n samples",
    "guided_decoding": "write a function for logits_processors",
    "structured_outputs": "write a function for logits_processors",
    "output_kind": "use LLM.stream for tokens as they come",
    "truncate_prompt_tokens": "cut the prompt's token ids yourself",
    "spaces_between_special_tokens": "use skip_special_tokens, or decode token_ids yourself",
}


@dataclass
class SamplingParams:
    """Raises TypeError for a wrong type or an unknown field, ValueError for a wrong value.

    A field may be set afterwards; it is checked again when a request is made with it.
    """

    n: int = 1  # samples of each prompt; the prompt is computed once
    temperature: float = 1.0  # divides the logits; 0 is greedy
    top_p: float = 1.0  # keep the smallest set of likely tokens with this much probability
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1 keeps all
    min_p: float = 0.0  # keep tokens at least this likely, relative to the likeliest
    seed: int | None = None  # same seed, same tokens, in whatever batch; None: the engine draws one
    max_tokens: int | None = 64  # output tokens; None: as many as max_model_len leaves
    min_tokens: int = 0  # output tokens before which nothing stops the output
    stop: str | Sequence[str] = ()  # end the output where one of these strings would appear
    stop_token_ids: Sequence[int] = ()  # end the output, beside the checkpoint's own
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False  # go on past the checkpoint's end-of-sequence tokens
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # the same, times how often they are there
    repetition_penalty: float = (
        1.0  # divides the logits of tokens in prompt or output (Keskar 2019)
    )
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these tokens
    allowed_token_ids: Sequence[int] | None = None  # draw from these alone
    bad_words: Sequence[str] = ()  # never complete one of these
    logprobs: int | None = None  # for each output token, its log-probability and the k likeliest
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    skip_special_tokens: bool = True  # in the text
    detokenize: bool = True  # False: no text, token ids only
    logits_processors: Sequence[LogitsProcessor] = ()

    def __new__(cls, *args: Any, **fields: Any) -> SamplingParams:
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name in ELSEWHERE:
                raise TypeError(f"no sampling parameter {name!r} here: {ELSEWHERE[name]}")
            if name not in known:
                raise TypeError(unknown_name("sampling parameter", name, known))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "detokenize",
        ):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        self._set("stop", (self.stop,) if isinstance(self.stop, str) else self._tuple("stop"))
        for name in ("stop", "bad_words"):
            for text in self._set(name, self._tuple(name)):
                if not isinstance(text, str):
                    raise TypeError(f"{name} must hold strings, not {text!r}")
                if not text.strip() if name == "bad_words" else not text:
                    raise ValueError(f"{name} holds an empty string; remove it")
        if self.stop and not self.detokenize:
            raise ValueError(
                "stop strings need the text: set detokenize=True, or use stop_token_ids"
            )
        for token in self._set("stop_token_ids", self._tuple("stop_token_ids")):
            check_int("a stop token id", token, 0)
        if self.allowed_token_ids is not None:
            allowed = self._set("allowed_token_ids", self._tuple("allowed_token_ids"))
            if not allowed:
                raise ValueError("allowed_token_ids is empty; None allows every token")
            for token in allowed:
                check_int("an allowed token id", token, 0)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(
                    f"logit_bias must map token ids to numbers, not {self.logit_bias!r}"
                )
            for token, bias in self.logit_bias.items():
                check_int("a token id of logit_bias", token, 0)
                check_number("a logit_bias", bias, -math.inf)
        for processor in self._set("logits_processors", self._tuple("logits_processors")):
            if not callable(processor):
                raise TypeError(f"logits_processors must be functions, not {processor!r}")

    def _check_numbers(self) -> None:
        for name, low, high, remark in (
            ("temperature", 0, math.inf, " (0 is greedy)"),
            ("top_p", 0, 1, ""),
            ("min_p", 0, 1, ""),
            ("presence_penalty", -2, 2, ""),
            ("frequency_penalty", -2, 2, ""),
            ("repetition_penalty", 0, math.inf, " (1 is none)"),
        ):
            check_number(name, getattr(self, name), low, high, remark)
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be more than 0, not 0")
        check_int("n", self.n, 1, 16_384)
        check_int("top_k", self.top_k, -1)
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            )
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0)

    def _tuple(self, name: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            kind = "a string or a list of strings" if name == "stop" else "a list"
            raise TypeError(f"{name} must be {kind}, not {value!r}")
        return tuple(value)

    def _set(self, name: str, value: tuple[Any, ...]) -> tuple[Any, ...]:
        setattr(self, name, value)
        return value


def check_number(
    name: str, value: object, low: float, high: float = math.inf, remark: str = ""
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not (low <= value <= high and abs(value) < 1e30):  # NaN fails too
        bound = f"between {low} and {high}" if math.isfinite(high) else "finite"
        if math.isfinite(low) and not math.isfinite(high):
            bound = f"{low} or more, and finite"
        raise ValueError(f"{name} must be {bound}{remark}, not {value}")
