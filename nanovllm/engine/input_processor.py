"""InputProcessor: from a prompt and its SamplingParams to the sequences of a request.

Requests are checked here before they are queued. Each check raises TypeError or ValueError; the
message names the value and what would work instead.
"""

import contextlib
from collections import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeAlias

from nanovllm.api.chat import Message, render, template_variables
from nanovllm.api.checks import located
from nanovllm.api.log import logger
from nanovllm.api.prompts import Prompt, as_list, split_prompt
from nanovllm.api.sampling_params import SamplingParams
from nanovllm.engine.detokenizer import Tokenizer
from nanovllm.engine.request import Search
from nanovllm.engine.sequence import EMPTY, Sequence
from nanovllm.features.embeddings.pooling import PoolingParams, PoolingSettings
from nanovllm.features.loglikelihood import ScoringParams, encode_pair
from nanovllm.features.structured import GrammarCompiler
from nanovllm.plan import FILTERS, LogitRules, RowSampling, Yield

# What a request asks for: new tokens, an embedding, or the log-probabilities of its last tokens.
Params: TypeAlias = SamplingParams | PoolingParams | ScoringParams
BATCH_SIZE = 1000  # prompts that are tokenized at a time: a fast tokenizer uses all cores


@dataclass(slots=True, frozen=True)
class CheckedParams:
    """Parameters, and what follows from them alone. Requests with the same parameters share it."""

    params: Params
    rules: LogitRules | None = None
    filters: tuple[float, ...] = tuple(FILTERS.values())
    stop_token_ids: frozenset[int] = frozenset()


class CheckedPrompt(NamedTuple):
    """A prompt that can run, what is asked for, and what chooses its tokens if they are not sampled."""

    text: str | None
    token_ids: list[int]
    max_length: int  # of prompt and output together
    asked: CheckedParams
    search: Search | None = None


@dataclass(eq=False)
class InputProcessor:
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    default_sampling_params: SamplingParams
    seed: int
    pooling: PoolingSettings = field(default_factory=PoolingSettings)
    has_head: bool = True
    max_logprobs: int = 20

    def __post_init__(self) -> None:
        self.warned_of_length = False
        self.grammars = GrammarCompiler(self.tokenizer, self.vocab_size, self.eos_token_ids)
        # Prompts share these, because an int takes 32 bytes, and a list of ints 8 for each.
        self.tokens = list(range(self.vocab_size))

    def check(
        self, pairs: abc.Sequence[tuple[Prompt, Params | None]], is_search: bool = False
    ) -> Iterator[CheckedPrompt]:
        """Check prompts and their parameters. Errors name the prompt if there are several."""
        known: dict[int, CheckedParams] = {}  # by the identity of parameters, which `pairs` holds
        i = 0
        try:
            for start in range(0, len(pairs), BATCH_SIZE):
                batch = range(start, min(start + BATCH_SIZE, len(pairs)))
                split: list[tuple[str | None, list[int] | None, CheckedParams]] = []
                for i in batch:
                    prompt, params = pairs[i]
                    if (asked := known.get(id(params))) is None:
                        asked = known[id(params)] = self._check_params(params, is_search)
                    split.append((*self._split(prompt, asked.params), asked))
                encoded = self.encode_all([text or "" for text, ids, _ in split if ids is None])
                for i in batch:
                    text, ids, asked = split[i - start]
                    token_ids = self._check_tokens(next(encoded) if ids is None else ids)
                    max_length = self._max_length(len(token_ids), asked.params)
                    yield CheckedPrompt(text, token_ids, max_length, asked)
        except (TypeError, ValueError):
            with located(f"prompts[{i}]: " * (len(pairs) > 1)):
                raise

    def _check_params(self, params: Params | None, is_search: bool) -> CheckedParams:
        params = self.check_params(params)
        if not isinstance(params, SamplingParams):
            return CheckedParams(params)
        filters = {name: getattr(params, name) for name in FILTERS}
        if not 0 < params.top_k < self.vocab_size:
            filters["top_k"] = FILTERS["top_k"]
        rules, stops = self.logit_rules(params, is_search), self._stop_ids(params)
        return CheckedParams(params, rules, tuple(filters.values()), stops)

    def check_params(self, params: Params | None) -> Params:
        """Return a checked copy: fields may have been set since the last check."""
        params = self.default_sampling_params if params is None else params
        if isinstance(params, PoolingParams):
            return self.pooling.complete(params)
        if not isinstance(params, SamplingParams | ScoringParams):
            raise TypeError(
                f"sampling_params must be a SamplingParams, not {params!r}; use embed with "
                "PoolingParams, and beam_search with BeamSearchParams"
            )
        if not self.has_head:
            raise ValueError(
                "the checkpoint has no head (lm_head.weight), which generation and log-likelihoods "
                "need; use embed, or load a checkpoint with a head"
            )
        return replace(params)

    def _max_length(self, num_tokens: int, params: Params) -> int:
        """Return how many tokens a request can have. Raises ValueError if it can never run."""
        if not isinstance(params, SamplingParams):
            is_scored = isinstance(params, ScoringParams)  # the last token is not computed
            if num_tokens > self.max_model_len + is_scored:
                raise ValueError(
                    f"{num_tokens} tokens are more than {self.max_model_len + is_scored}, the limit "
                    f"with max_model_len={self.max_model_len}; shorten the prompt or raise "
                    "max_model_len"
                )
            return num_tokens - is_scored
        room = self.max_model_len - num_tokens
        if room < 1:
            raise ValueError(
                f"the prompt has {num_tokens} tokens, which leaves no room for output under "
                f"max_model_len={self.max_model_len}; shorten it or raise max_model_len"
            )
        if params.max_tokens is not None and params.max_tokens > room and not self.warned_of_length:
            self.warned_of_length = True
            logger.warning(
                f"max_tokens={params.max_tokens}, but max_model_len={self.max_model_len} leaves "
                f"{room} after a prompt of {num_tokens} tokens: the output ends there with the "
                "finish_reason 'length'. Later requests are cut without a warning"
            )
        return num_tokens + min(params.max_tokens or room, room)

    def make_sequences(
        self, request_id: str, arrival: int, prompt: CheckedPrompt
    ) -> list[Sequence]:
        """Return one sequence for each of the n samples. The first computes the prompt for all."""
        token_ids, asked, params = prompt.token_ids, prompt.asked, prompt.asked.params
        sampling = RowSampling(temperature=0, seed=0)
        if isinstance(params, SamplingParams):
            # Requests without a seed differ from each other, and the same engine seed repeats a run.
            seed = params.seed
            if seed is None:
                seed = (self.seed + 1) * 0x9E3779B97F4A7C15 + arrival
            sampling = RowSampling(params.temperature, _signed64(seed), asked.filters, asked.rules)
        seq = Sequence(
            request_id=request_id,
            arrival=arrival,
            token_ids=token_ids,
            num_prompt=len(token_ids),
            max_length=prompt.max_length,
            stop_token_ids=asked.stop_token_ids,
            sampling=sampling,
        )
        if isinstance(params, PoolingParams):
            seq.yields = Yield.HIDDEN_STATE
        elif isinstance(params, ScoringParams):
            seq.yields, seq.first_target = Yield.NOTHING, len(token_ids) - params.num_tokens
            seq.targets = token_ids[seq.first_target :]
            del token_ids[-1]  # the last token to score is not computed
            seq.num_prompt = len(token_ids)
        else:
            if params.prompt_logprobs is not None:
                seq.targets = token_ids[1:]
            seq.forks = [_fork(seq, index) for index in range(1, params.n)] or seq.forks
            return [seq, *seq.forks]
        return [seq]

    def tokenize_pairs(
        self, prompts: "Prompt | Iterable[Prompt]", continuations: "Prompt | Iterable[Prompt]"
    ) -> list[tuple[Prompt, ScoringParams]]:
        """Return each prompt with its continuation, and what to score of it."""
        stems, ends = as_list(prompts), as_list(continuations, "continuations")
        if len(stems) == 1:
            stems = stems * len(ends)
        if len(stems) != len(ends):
            raise ValueError(
                f"{len(stems)} prompts but {len(ends)} continuations; give one for each, or one "
                "prompt for all"
            )
        pairs: list[tuple[Prompt, ScoringParams]] = []
        for i, (stem, end) in enumerate(zip(stems, ends, strict=True)):
            with located(f"pair {i}: " * (len(stems) > 1)):
                ids, new = self._tokenize_pair(stem, end)
            pairs.append(([*ids, *new], ScoringParams(len(new))))
        return pairs

    def _tokenize_pair(self, stem: Prompt, end: Prompt) -> tuple[list[int], list[int]]:
        (text, ids), (continuation, new) = split_prompt(stem), split_prompt(end)
        if ids is None and new is None:
            pair = text or "", continuation or ""
            ids, new = encode_pair(*pair, self.encode) if continuation else ([0], [])
        elif new is None:
            raise TypeError(
                f"the continuation {end!r:.80} is text, and its prompt is token ids: {stem!r:.80}; "
                "give both as text, or the continuation as token ids"
            )
        elif ids is None:
            ids = self.encode(text or "")
        if not ids or not new:
            what = "prompt" if new else "continuation"
            raise ValueError(f"the {what} is empty; give at least one token")
        return ids, new

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt in any of its forms."""
        text, ids = split_prompt(prompt)
        return self._check_tokens(self.encode(text or "") if ids is None else ids)

    def _split(self, prompt: Prompt, params: Params) -> tuple[str | None, list[int] | None]:
        """Return (text, token ids), one of which may be None.

        `params` of an embedding may name a prompt of the checkpoint, which is put before the text.
        """
        text, ids = split_prompt(prompt)
        if ids is None and text is not None:
            text = self.pooling.prefix(params) + text if isinstance(params, PoolingParams) else text
        elif isinstance(params, PoolingParams) and params.prompt_name is not None:
            raise ValueError(
                f"prompt_name={params.prompt_name!r} needs a text to be put before, not token ids"
            )
        return text, ids

    def _check_tokens(self, ids: list[int]) -> list[int]:
        """Return the token ids of a prompt. Raises ValueError if the model does not have them."""
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        size = self.vocab_size
        if min(ids) < 0 or max(ids) >= size:
            token = next(token for token in ids if not 0 <= token < size)
            raise ValueError(
                f"token id {token} is outside the vocabulary of {size} (0 to {size - 1})"
            )
        return [self.tokens[token] for token in ids]

    def chat_prompt(
        self, conversation: Iterable[Message], variables: dict[str, Any], more: Any = None
    ) -> Prompt:
        """Return the prompt of a conversation. `variables` are those of the chat template, and the
        template itself; `more`, the chat_template_kwargs of a caller, take precedence.
        """
        variables = template_variables(variables, more)
        template = variables.pop("chat_template", None)
        text = render(conversation, self.get_tokenizer(), template, **variables)
        return {"prompt": text, "prompt_token_ids": self.encode(text, add_special_tokens=False)}

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("the engine has no tokenizer (skip_tokenizer_init); give token ids")
        return self.tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises ValueError if there are none."""
        tokenizer = self.get_tokenizer()
        try:
            # With verbose=True, a long text prints that indexing errors will follow.
            return list(
                tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
            )
        except (TypeError, UnicodeError):  # raised by tokenizers if text is not Unicode
            raise ValueError(f"the text cannot be encoded as UTF-8: {text!r:.80}") from None
        except Exception as error:  # that is what tokenizers raises of text without a token
            raise ValueError(f"the tokenizer cannot encode {text!r:.80}: {error}") from error

    def encode_all(self, texts: list[str]) -> Iterator[list[int]]:
        """Yield what `encode` returns for each text. One call for all takes a fraction of the time."""
        if len(texts) > 1:
            options = {"return_attention_mask": False, "return_token_type_ids": False}
            with contextlib.suppress(TypeError, UnicodeError):  # `encode` finds which text it is
                return iter(self.get_tokenizer()(texts, verbose=False, **options)["input_ids"])
        return map(self.encode, texts)

    def logit_rules(self, params: Params, is_search: bool = False) -> LogitRules | None:
        """Return the rules that the parameters ask for, or None. May compile a grammar.

        is_search: `logprobs` is the number of candidates of a search, which has no other limit than
        the vocabulary.
        """
        if not isinstance(params, SamplingParams):
            return None
        size = self.vocab_size
        bias = params.logit_bias or {}
        self._check_ids("logit_bias has", bias)
        self._check_ids("allowed_token_ids has", params.allowed_token_ids)
        self._check_ids("stop_token_ids has", params.stop_token_ids)
        most = size if is_search or self.max_logprobs == -1 else self.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name) or 0
            if value > size:
                raise ValueError(f"{name}={value} is more than the vocabulary of {size} tokens")
            if value > most or (value == -1 and size > most):
                raise ValueError(
                    f"{name}={value} is more than max_logprobs={most}"
                    + f", because -1 is the whole vocabulary of {size}" * (value == -1)
                    + "; ask for fewer, or give LLM() a larger max_logprobs (-1: no limit)"
                )
        if (params.stop or params.bad_words) and self.tokenizer is None:
            raise ValueError(
                "stop strings and bad words need a tokenizer (skip_tokenizer_init is set)"
            )
        bad_words = set()
        for word in params.bad_words or ():
            for text in (word, " " + word.lstrip()):  # at the start of a line, and after a word
                ids = self.encode(text, add_special_tokens=False)
                self._check_ids(f"bad_words has {text!r:.80}, which is encoded with", ids)
                bad_words.add(tuple(ids))
        stops = sorted(self._stop_ids(params))
        names = {f.name for f in fields(LogitRules)} - {"stops", "grammar"}
        values = {name: getattr(params, name) for name in names}
        values = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        values |= {"logit_bias": tuple(bias.items()), "bad_words": tuple(sorted(bad_words))}
        values |= {n: size for n in ("logprobs", "prompt_logprobs") if values[n] == -1}
        values["min_tokens"] = min(params.min_tokens, self.max_model_len)
        if params.structured_outputs is not None:
            values["grammar"] = self.grammars.compile(params.structured_outputs, stops)
        rules = LogitRules(**values, stops=tuple(stops) if params.min_tokens else ())
        return None if rules == LogitRules() else rules

    def _check_ids(self, what: str, ids: Iterable[int] | None) -> None:
        if (token := max(ids or (), default=0)) >= self.vocab_size:
            raise ValueError(
                f"{what} token id {token}; the vocabulary of the model ends at {self.vocab_size - 1}"
            )

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens that end the output."""
        own = frozenset(params.stop_token_ids or ())
        return own if params.ignore_eos else own | self.eos_token_ids


def _fork(first: Sequence, index: int) -> Sequence:
    """Return another sample of the prompt, with a seed of its own."""
    rules = first.sampling.rules
    if rules is not None:  # the first sample computes the prompt's log-probabilities
        rules = replace(rules, prompt_logprobs=None)
    seed = _signed64(first.sampling.seed + index * 0xD1B54A32D192ED03)
    sampling, token_ids = replace(first.sampling, rules=rules, seed=seed), list(first.token_ids)
    own: dict[str, Any] = {"token_ids": token_ids, "block_table": [], "targets": EMPTY}
    return replace(first, index=index, parent=first, sampling=sampling, **own)


def _signed64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
