"""InputProcessor: from a prompt and its SamplingParams to the sequences of a request.

Requests are checked here before they are queued. Each check raises TypeError or ValueError; the
message names the value and what would work instead.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

from nanovllm.chat import Message, render, template_variables
from nanovllm.checks import located
from nanovllm.detokenizer import Tokenizer
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import FILTERS, LogitRules, RowSampling, Yield
from nanovllm.pooling import PoolingParams, PoolingSettings
from nanovllm.prompts import Prompt, as_list, plain_ids, split_prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.scoring import ScoringParams, encode_pair
from nanovllm.structured import GrammarCompiler

# What a request asks for: new tokens, an embedding, or the log-probabilities of its last tokens.
Params: TypeAlias = SamplingParams | PoolingParams | ScoringParams


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

    def __post_init__(self) -> None:
        self.grammars = GrammarCompiler(self.tokenizer, self.vocab_size, self.eos_token_ids)

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

    def make_sequences(
        self,
        request_id: str,
        arrival: int,
        token_ids: list[int],
        params: Params,
        rules: LogitRules | None,
    ) -> list[Sequence]:
        """Return one sequence for each of the n samples. The first computes the prompt for all.

        rules: what `logit_rules` returned for the parameters.
        """
        seq = Sequence(
            request_id=request_id,
            arrival=arrival,
            token_ids=token_ids,
            num_prompt=len(token_ids),
            max_length=len(token_ids),
            stop_token_ids=frozenset(),
            sampling=RowSampling(temperature=0, seed=0),
        )
        if not isinstance(params, SamplingParams):
            self._end_with_prompt(seq, params)
            return [seq]
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, which leaves no room for output under "
                f"max_model_len={self.max_model_len}; shorten it or raise max_model_len"
            )
        # Requests without a seed differ from each other, and the same engine seed repeats a run.
        seed = params.seed
        if seed is None:
            seed = (self.seed + 1) * 0x9E3779B97F4A7C15 + arrival
        filters = {name: getattr(params, name) for name in FILTERS}
        if not 0 < params.top_k < self.vocab_size:
            filters["top_k"] = FILTERS["top_k"]
        values = tuple(filters.values())
        seq.sampling = RowSampling(params.temperature, _signed64(seed), values, rules)
        seq.max_length += min(params.max_tokens or room, room)
        seq.stop_token_ids = self._stop_ids(params)
        if params.prompt_logprobs is not None:
            seq.targets = token_ids[1:]
        return [seq, *(_fork(seq, index) for index in range(1, params.n))]

    def _end_with_prompt(self, seq: Sequence, params: PoolingParams | ScoringParams) -> None:
        """Let a sequence yield what the parameters ask for when its prompt is computed."""
        num_tokens, is_scored = len(seq.token_ids), isinstance(params, ScoringParams)
        if num_tokens > self.max_model_len + is_scored:
            raise ValueError(
                f"{num_tokens} tokens are more than {self.max_model_len + is_scored}, the limit "
                f"with max_model_len={self.max_model_len}; shorten the prompt or raise max_model_len"
            )
        seq.yields = Yield.HIDDEN_STATE
        if isinstance(params, ScoringParams):
            seq.yields, seq.first_target = Yield.NOTHING, num_tokens - params.num_tokens
            seq.targets = seq.token_ids[seq.first_target :]
            del seq.token_ids[-1]  # the last token to score is not computed
            seq.num_prompt = seq.max_length = len(seq.token_ids)

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
        if isinstance(stem, str) and isinstance(end, str):
            ids, new = encode_pair(stem, end, self.encode) if end else ([0], [])
        elif isinstance(end, str):
            raise TypeError(
                f"the continuation {end!r:.80} is a string, and its prompt is not: {stem!r:.80}; "
                "give both as strings, or both as token ids"
            )
        else:
            end = plain_ids(end)
            ids, new = self.tokenize(stem)[1], [] if end == [] else self.tokenize(end)[1]
        if not ids or not new:
            what = "prompt" if new else "continuation"
            raise ValueError(f"the {what} is empty; give at least one token")
        return ids, new

    def tokenize(
        self, prompt: Prompt, params: Params | None = None
    ) -> tuple[str | None, list[int]]:
        """Return (text or None, token ids) of a prompt in any of its forms.

        `params` of an embedding may name a prompt of the checkpoint, which is put before the text.
        """
        text, ids = split_prompt(prompt)
        if ids is None and text is not None:
            text = self.pooling.prefix(params) + text if isinstance(params, PoolingParams) else text
            ids = self.encode(text)
        elif isinstance(params, PoolingParams) and params.prompt_name is not None:
            raise ValueError(
                f"prompt_name={params.prompt_name!r} needs a text to be put before, not token ids"
            )
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        size = self.vocab_size
        for token in ids:
            if not 0 <= token < size:
                raise ValueError(
                    f"token id {token} is outside the vocabulary of {size} (0 to {size - 1})"
                )
        return text, ids

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
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except (TypeError, UnicodeError):  # raised by tokenizers if text is not Unicode
            raise ValueError(f"the text cannot be encoded as UTF-8: {text!r:.80}") from None
        except Exception as error:  # that is what tokenizers raises of text without a token
            raise ValueError(f"the tokenizer cannot encode {text!r:.80}: {error}") from error

    def logit_rules(self, params: Params) -> LogitRules | None:
        """Return the rules that the parameters ask for, or None. May compile a grammar."""
        if not isinstance(params, SamplingParams):
            return None
        size = self.vocab_size
        bias, allowed = params.logit_bias or {}, params.allowed_token_ids
        for name, ids in (("logit_bias", bias), ("allowed_token_ids", allowed or ())):
            if (token := max(ids, default=0)) >= size:
                raise ValueError(f"{name} has token id {token}; the vocabulary ends at {size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > size:
                raise ValueError(
                    f"{name}={getattr(params, name)} is more than the vocabulary of {size} tokens"
                )
        if (params.stop or params.bad_words) and self.tokenizer is None:
            raise ValueError(
                "stop strings and bad words need a tokenizer (skip_tokenizer_init is set)"
            )
        bad_words = set()
        for word in params.bad_words or ():
            for text in (word, " " + word.lstrip()):  # at the start of a line, and after a word
                bad_words.add(tuple(self.encode(text, add_special_tokens=False)))
        stops = sorted(t for t in self._stop_ids(params) if t < size)
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

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens that end the output."""
        own = frozenset(params.stop_token_ids or ())
        return own if params.ignore_eos else own | self.eos_token_ids


def _fork(first: Sequence, index: int) -> Sequence:
    """Return another sample of the prompt, with a seed of its own, and add it to the forks of `first`."""
    rules = first.sampling.rules
    if rules is not None:  # the first sample computes the prompt's log-probabilities
        rules = replace(rules, prompt_logprobs=None)
    seed = _signed64(first.sampling.seed + index * 0xD1B54A32D192ED03)
    sampling, token_ids = replace(first.sampling, rules=rules, seed=seed), list(first.token_ids)
    own: dict[str, Any] = {"forks": [], "block_table": [], "block_hashes": [], "targets": []}
    fork = replace(first, index=index, parent=first, token_ids=token_ids, sampling=sampling, **own)
    first.forks.append(fork)
    return fork


def _signed64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
