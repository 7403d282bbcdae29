"""The parameters of requests, with the names of vLLM: of sampling, beam searches and embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypeAlias

from nanovllm.utils.checks import Positive, Seed, check_scalar, check_scalars


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The format that the text of an output must have. Set exactly one of these fields:

    json: the output matches this JSON schema. It is a dict, a string or a pydantic model.
    regex: the whole output matches this regular expression. Look-around and back-references are
        not supported.
    choice: the output is one of these strings.
    grammar: the output matches this context-free grammar in GBNF, or in Lark's notation with the
        rule `start`.
    json_object: if True, the output is any JSON object.

    Raises TypeError for a wrong type or an unknown field. Raises ValueError if not exactly one
    field is set. The grammar is compiled, and may be refused, when a request uses it.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        check_scalars(self)
        names = [field.name for field in fields(self)]
        given = [name for name in names if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of {', '.join(names)}, not {' and '.join(given) or 'none'}"
            )


@dataclass(frozen=True)
class RepetitionDetectionParams:
    """When an output counts as repetitive, with the names of vLLM.

    It ends if its last tokens are a pattern `min_count` times in a row. Raises TypeError for a
    wrong type or an unknown field, ValueError for a wrong value.
    """

    max_pattern_size: Annotated[int, 0, math.inf] = 0  # tokens; 0: nothing is detected
    min_pattern_size: Annotated[int, 0, math.inf] = 0  # 0 is the same as 1
    min_count: Annotated[int, 0, math.inf] = 0

    def __post_init__(self) -> None:
        check_scalars(self)
        sizes = (
            f"min_pattern_size={self.min_pattern_size}, max_pattern_size={self.max_pattern_size}"
        )
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(f"{sizes}: the first must be at most the second")
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError(f"min_count must be at least 2, not {self.min_count}, with {sizes}")


# (output ids, logits [V] float32) -> logits [V], or (prompt ids, output ids, logits) -> logits.
# Called for each token of the request, with logits on the engine's device.
LogitsProcessor: TypeAlias = Callable[..., Any]
TOKEN_IDS = (0, math.inf)


@dataclass(slots=True)
class SamplingParams:
    """How the tokens of one request are sampled and when it ends.

    n: samples of each prompt; the prompt is computed once.
    temperature: divides the logits; 0 is greedy.
    top_p: keep the smallest set of tokens whose probability reaches p.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    min_p: keep tokens at least this likely, relative to the most likely.
    seed: seeds the random numbers; None or -1: the engine chooses a seed for each request.
    max_tokens: largest number of output tokens; None: as many as max_model_len leaves.
    min_tokens: smallest number of output tokens.
    stop: a string or strings that end the output.
    stop_token_ids: further tokens that end the output.
    include_stop_str_in_output: keep the stop string, or the text of a stop token, in the text.
    ignore_eos: continue after the checkpoint's end-of-sequence tokens.
    presence_penalty: subtracted from the logits of tokens in the output.
    frequency_penalty: the same, times the number of occurrences.
    repetition_penalty: divides the logits of tokens in prompt or output (Keskar et al. 2019,
        arXiv:1909.05858).
    logit_bias: token id, also as a string -> number added to the logit of the token.
    allowed_token_ids: sample only these tokens.
    bad_words: words that must not occur in the output.
    logprobs: report the log-probabilities of the sampled and the k most likely tokens; -1 reports
        all tokens of the vocabulary. max_logprobs of LLM() is the limit.
    prompt_logprobs: the same for each prompt token except the first.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: False returns token ids without text.
    logits_processors: functions (output ids, logits) -> logits or (prompt ids, output ids, logits)
        -> logits, called for each token with lists of ids and float32 logits [V].
    structured_outputs: a grammar that the output follows; see StructuredOutputsParams.
    logprob_token_ids: report the log-probabilities of these tokens at each position.
    repetition_detection: end an output that repeats itself; see
        RepetitionDetectionParams.
    thinking_token_budget: end the thinking after this number of tokens; -1: no limit.

    Raises TypeError for a wrong type or an unknown field, ValueError for a wrong value. Fields may
    be set later. They are checked again when a request uses them. None for a list is an empty list.
    """

    n: Annotated[int, 1, 16_384] = 1
    temperature: Annotated[float, 0, math.inf] = 1.0
    top_p: Annotated[float, 0, 1] = 1.0
    top_k: Annotated[int, -1, math.inf] = 0
    min_p: Annotated[float, 0, 1] = 0.0
    seed: Seed | None = None
    max_tokens: Positive | None = 64
    min_tokens: Annotated[int, 0, math.inf] = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: Annotated[float, -2, 2] = 0.0
    frequency_penalty: Annotated[float, -2, 2] = 0.0
    # Division by less could give infinity.
    repetition_penalty: Annotated[float, 0.01, math.inf] = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    logprobs: Annotated[int, -1, math.inf] | None = None
    prompt_logprobs: Annotated[int, -1, math.inf] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    logits_processors: Sequence[LogitsProcessor] | None = ()
    structured_outputs: StructuredOutputsParams | None = None
    logprob_token_ids: Sequence[int] | None = None
    repetition_detection: Any = None
    thinking_token_budget: Annotated[int, -1, math.inf] | None = None

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Return an object with these fields. As in vLLM, None means the default, unless the field
        accepts None.
        """
        known = cls.__dataclass_fields__
        required = {name for name, field in known.items() if "None" not in field.type}
        return cls(**{n: v for n, v in fields.items() if v is not None or n not in required})

    def clone(self) -> SamplingParams:
        """Return a checked copy. Lists and logit_bias are copied; logits processors are shared."""
        return replace(self)

    def __post_init__(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:  # as in vLLM
                setattr(self, name, 1)
        check_scalars(self)
        self.seed = None if self.seed == -1 else self.seed  # as in vLLM
        if self.top_p == 0:
            raise ValueError("top_p must be more than 0, not 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            )
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name in ("stop", "bad_words"):
            for text in self._as_list(name):
                if not isinstance(text, str):
                    raise TypeError(f"{name} must hold strings, not {text!r}")
                if not text.strip() if name == "bad_words" else not text:
                    kind = "blank" if text else "empty"
                    raise ValueError(f"{name} holds the {kind} string {text!r}; remove it")
        if self.stop and not self.detokenize:
            raise ValueError(
                "stop strings need the text: set detokenize=True, or use stop_token_ids"
            )
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            if name == "stop_token_ids" or getattr(self, name) is not None:
                ids = self._as_list(name)
                what = f"a token id of {name}"
                setattr(self, name, [check_scalar(what, token, int, TOKEN_IDS) for token in ids])
        if self.allowed_token_ids == []:
            raise ValueError("allowed_token_ids is empty; None allows every token")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(
                    f"logit_bias must map token ids to numbers, not {self.logit_bias!r}"
                )
            bias = {}
            for token, value in self.logit_bias.items():
                # In JSON the names of an object are strings.
                token = int(token) if isinstance(token, str) and token.isdecimal() else token
                token = check_scalar("a token id of logit_bias", token, int, TOKEN_IDS)
                bias[token] = check_scalar("a logit_bias", value, float)
            self.logit_bias = bias
        for processor in self._as_list("logits_processors"):
            if not callable(processor):
                raise TypeError(f"logits_processors must be functions, not {processor!r}")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise TypeError(
                "structured_outputs must be a StructuredOutputsParams, not "
                f"{self.structured_outputs!r}"
            )

    def _as_list(self, name: str) -> list[Any]:
        """Replace a field by a new list, which users may extend. Return a copy."""
        value = getattr(self, name)
        value = () if value is None else value
        value = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            kind = "a string or a list of strings" if name == "stop" else "a list"
            raise TypeError(f"{name} must be {kind}, not {value!r}")
        setattr(self, name, list(value))
        return list(value)


@dataclass(slots=True)
class BeamSearchParams:
    """Parameters of a beam search.

    Raises TypeError for a wrong type or an unknown field, ValueError for a wrong value.
    """

    beam_width: Annotated[int, 1, 16_384]  # beams and results per prompt
    max_tokens: Positive  # output tokens of a beam
    ignore_eos: bool = False  # continue after an end-of-sequence token
    # As in vLLM, it has no effect: scores are log-probabilities before the temperature.
    temperature: Annotated[float, 0, math.inf] = 0.0
    # Finished beams are compared by cum_logprob / (output tokens) ** length_penalty. 0 compares the
    # sums, which favours short outputs; a larger value favours longer ones. Beyond 10 the power
    # could overflow.
    length_penalty: Annotated[float, -10, 10] = 1.0
    include_stop_str_in_output: bool = False  # whether `tokens` includes the end-of-sequence token
    # A grammar that every result follows, as in SamplingParams. It does not change scores.
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True  # leave special tokens out of the text

    def __post_init__(self) -> None:
        check_scalars(self)


@dataclass(slots=True)
class PoolingParams:
    """Parameters of an embedding. None uses the setting of the checkpoint, or else the default.

    Raises TypeError for a wrong type or an unknown field, ValueError for a wrong value. The fields
    are checked again when a request uses them.
    """

    # Number of leading dimensions to keep (Matryoshka, Kusupati et al. 2022, arXiv:2205.13147).
    # The default is all.
    dimensions: Positive | None = None
    normalize: bool | None = None  # divide the kept dimensions by their L2 norm; default True
    # The name of a prompt of the checkpoint, such as "query". It is prepended to the text.
    prompt_name: str | None = None
    use_activation: bool | None = None  # vLLM's name of `normalize`

    def __post_init__(self) -> None:
        check_scalars(self)
        if self.use_activation is not None:
            if self.normalize not in (None, self.use_activation):
                raise ValueError("normalize and use_activation are two names of one field")
            self.normalize = self.use_activation
            self.use_activation = None


@dataclass(frozen=True)
class ScoringParams:
    """Parameters of a request that scores the last tokens of its prompt, the continuation."""

    num_tokens: int  # of the continuation; at least one token precedes them
