"""Request: what the engine keeps of a request beside its sequences, and how one is made of a prompt.

Owns: nothing; the engine owns the requests. Given: prompts and SamplingParams, which are checked here
against the tokenizer and the vocabulary. No torch here.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from nanovllm.detokenizer import Detokenizer
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import RequestMetrics
from nanovllm.plan import LogitRules, TokenLogprobs
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A string, token ids, or a dict with "prompt" or "prompt_token_ids", or both: ids and their text.
Prompt: TypeAlias = "str | list[int] | dict[str, Any]"


@dataclass(slots=True)
class Sample:
    """A sequence and what it has said, for the requests that look at each token as it comes."""

    seq: Sequence
    request: "Request"
    detokenizer: Detokenizer | None = None  # for stop strings and streams
    text: str = ""
    num_seen: int = 0  # output tokens that are in `text`
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    streamed: tuple[int, int] = (0, 0)  # characters and tokens that a stream has handed out

    def news(self) -> tuple[str, list[int]]:
        """Text and tokens since the last call, less what may yet turn out to begin a stop string."""
        end = len(self.text)
        if self.seq.finish_reason is None:
            longest = max((len(stop) for stop in self.request.params.stop), default=1)
            end = max(self.streamed[0], end - longest + 1)
        text = self.text[self.streamed[0] : end]
        new = self.seq.token_ids[self.seq.num_prompt + self.streamed[1] :]
        self.streamed = (end, self.streamed[1] + len(new))
        return text, new


@dataclass(slots=True)
class Request:
    """What the engine keeps of a request beside its sequences, one for each of its n samples."""

    seqs: list[Sequence]
    prompt: str | None
    params: SamplingParams
    metrics: RequestMetrics
    num_unfinished: int  # of the samples
    stream: bool  # its results are read from its samples, as they come
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position


def tokenize(
    prompt: Prompt, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int
) -> tuple[str | None, list[int]]:
    """(text or None, token ids); refuses what is no prompt."""
    text: object = None
    ids: object = prompt
    if isinstance(prompt, str):
        text, ids = prompt, None
    elif isinstance(prompt, dict):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if (text is None and ids is None) or not prompt.keys() <= {
            "prompt",
            "prompt_token_ids",
        }:
            raise ValueError(
                "a dict prompt needs 'prompt' or 'prompt_token_ids', and nothing else, not "
                f"{sorted(map(str, prompt))}"
            )
    if text is not None and not isinstance(text, str):
        raise TypeError(f"the text of a prompt must be a string, not {text!r}")
    if ids is None and text is not None:
        if tokenizer is None:
            raise ValueError("the engine has no tokenizer (skip_tokenizer_init); give token ids")
        try:
            ids = tokenizer.encode(text)
        except (TypeError, UnicodeError):  # tokenizers' word for text that is no Unicode
            raise ValueError(f"the prompt cannot be encoded as UTF-8: {text!r:.80}") from None
    if not isinstance(ids, list | tuple):
        raise TypeError(f"a prompt must be a string, a list of token ids or a dict, not {ids!r}")
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    size = vocab_size
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"a token id must be an int, not {token!r}")
        if not 0 <= token < size:
            raise ValueError(
                f"token id {token} is outside the vocabulary of {size} (0 to {size - 1})"
            )
    return text, list(ids)


def logit_rules(
    params: SamplingParams,
    tokenizer: "PreTrainedTokenizerBase | None",
    vocab_size: int,
    eos_token_ids: frozenset[int],
) -> LogitRules | None:
    """What the parameters ask of the logits, checked against the vocabulary; None for nothing."""
    size = vocab_size
    bias, allowed = params.logit_bias or {}, params.allowed_token_ids
    for name, ids in (("logit_bias", bias), ("allowed_token_ids", allowed or ())):
        for token in ids:
            if token >= size:
                raise ValueError(f"{name} has token id {token}; the vocabulary ends at {size - 1}")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > size:
            raise ValueError(
                f"{name}={getattr(params, name)} is more than the {size} tokens there are"
            )
    if (params.stop or params.bad_words) and tokenizer is None:
        raise ValueError("stop strings and bad words need a tokenizer (skip_tokenizer_init is set)")
    bad_words = set()
    for word in params.bad_words:
        for text in (word, " " + word.lstrip()):  # at the start of a line, and after a word
            assert tokenizer is not None
            bad_words.add(tuple(tokenizer.encode(text, add_special_tokens=False)))
    stops = stop_ids(params, eos_token_ids)
    rules = LogitRules(
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        bias=tuple(bias.items()),
        allowed=None if allowed is None else tuple(allowed),
        bad_words=tuple(sorted(bad_words)),
        min_tokens=params.min_tokens,
        stops=tuple(sorted(t for t in stops if t < size)) if params.min_tokens else (),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        processors=tuple(params.logits_processors),
    )
    return None if rules == LogitRules() else rules


def stop_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end the output."""
    own = frozenset(params.stop_token_ids)
    return own if params.ignore_eos else own | eos_token_ids


def fork_of(first: Sequence, index: int) -> Sequence:
    """Another sample of the same prompt, with noise of its own; queued once `first` has a token."""
    sampling, rules = first.sampling, first.sampling.rules
    if rules is not None:  # the first sample computes the prompt's log-probabilities for all
        rules = replace(rules, prompt_logprobs=None)
    fork = Sequence(
        request_id=first.request_id,
        arrival=first.arrival,
        token_ids=list(first.token_ids),
        num_prompt=first.num_prompt,
        max_length=first.max_length,
        stop_token_ids=first.stop_token_ids,
        sampling=replace(
            sampling, rules=rules, seed=signed64(sampling.seed + index * 0xD1B54A32D192ED03)
        ),
        index=index,
        parent=first,
    )
    first.forks.append(fork)
    return fork


def signed64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
