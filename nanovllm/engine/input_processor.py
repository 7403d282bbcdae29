"""InputProcessor: converts the prompts of a caller to token ids that the model can compute.

Prompts are checked here before they are queued. An invalid prompt raises TypeError or ValueError,
whose message names the value and says what to do instead.
"""

import contextlib
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanovllm.engine.chat import Message, render, template_variables
from nanovllm.engine.detokenizer import Tokenizer
from nanovllm.engine.task import Task
from nanovllm.inputs import Prompt, parse_prompt
from nanovllm.plan import LogitRules
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import located
from nanovllm.utils.log import logger

DEFAULTS = SamplingParams()
# The sampling parameters that need logit rules. The other fields of LogitRules follow from them.
RULE_PARAMETERS = [
    *(name for name in LogitRules.__dataclass_fields__ if hasattr(DEFAULTS, name)),
    "structured_outputs",
]
PROMPTS_AT_ONCE = 1000  # prompts tokenized at a time; a fast tokenizer uses all cores


class CheckedPrompt(NamedTuple):
    """A prompt that has passed all checks."""

    text: str | None
    token_ids: list[int]
    max_length: int  # of prompt and output together
    task: Task


@dataclass(eq=False)
class InputProcessor:
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int  # not more than the tokens that the KV cache holds
    eos_token_ids: frozenset[int]
    default_sampling_params: SamplingParams
    seed: int
    has_head: bool = True
    max_logprobs: int = 20
    # These are None if their files in features/ are deleted.
    make_rules: Any = None  # `make_rules` of features/requests/logit_rules/params.py
    grammars: Any = None  # a GrammarCompiler of features/requests/structured.py
    pooling: Any = None  # PoolingSettings: the embedding settings of the checkpoint
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.warned_of_length = False
        # Prompts share these ints: an int takes 32 bytes, and a reference in a list only 8.
        self.tokens = list(range(self.vocab_size))

    def check(
        self, pairs: abc.Sequence[tuple[Prompt, Any]], make_task: Callable[[Any], Task]
    ) -> Iterator[CheckedPrompt]:
        """Check prompts and their parameters. Errors name the prompt if there are several."""
        tasks: dict[int, Task] = {}  # by the id() of parameters, which `pairs` keeps alive
        i = 0
        try:
            for start in range(0, len(pairs), PROMPTS_AT_ONCE):
                batch = range(start, min(start + PROMPTS_AT_ONCE, len(pairs)))
                split: list[tuple[str | None, list[int] | None, Task]] = []
                for i in batch:
                    prompt, params = pairs[i]
                    if (task := tasks.get(id(params))) is None:
                        task = tasks[id(params)] = make_task(params)
                    text, ids = parse_prompt(prompt)
                    text, ids = task.prepare(text, ids)
                    split.append((text, ids, task))
                encoded = self.encode_all([text or "" for text, ids, _ in split if ids is None])
                for i in batch:
                    text, ids, task = split[i - start]
                    token_ids = self.check_tokens(next(encoded) if ids is None else ids)
                    yield CheckedPrompt(text, token_ids, task.max_length(len(token_ids)), task)
        except (TypeError, ValueError):
            with located(f"prompts[{i}]: " * (len(pairs) > 1)):
                raise

    def check_head(self) -> None:
        """Raise ValueError if the model has no head."""
        if not self.has_head:
            raise ValueError(
                "the checkpoint has no lm_head.weight, and tie_word_embeddings in its config.json "
                "is false; generation and log-likelihoods need a head. Use embed, or load a "
                "checkpoint with a head"
            )

    def check_length(self, num_tokens: int, max_length: int) -> None:
        """Raise ValueError if the prompt of a request without output exceeds `max_length`."""
        if num_tokens > max_length:
            raise ValueError(
                f"{num_tokens} tokens are more than {max_length}, the limit with "
                f"max_model_len={self.max_model_len}; shorten the prompt, or raise max_model_len, "
                "which the model and the KV cache limit"
            )

    def room_for_output(self, num_tokens: int, max_tokens: int | None) -> int:
        """Return how many output tokens a request may have. Raises ValueError if it is none."""
        room = self.max_model_len - num_tokens
        if room < 1:
            raise ValueError(
                f"the prompt has {num_tokens} tokens, which leaves no room for output under "
                f"max_model_len={self.max_model_len}; shorten it, or raise max_model_len, "
                "which the model and the KV cache limit"
            )
        if max_tokens is not None and max_tokens > room and not self.warned_of_length:
            self.warned_of_length = True
            logger.warning(
                f"max_tokens={max_tokens}, but max_model_len={self.max_model_len} leaves {room} "
                f"after a prompt of {num_tokens} tokens: the output ends there with the "
                "finish_reason 'length'. Later requests are cut without a warning"
            )
        return min(max_tokens or room, room)

    def check_tokens(self, ids: list[int]) -> list[int]:
        """Return the token ids of a prompt. Raises ValueError if it is empty or has invalid ids."""
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        size = self.vocab_size
        if min(ids) < 0 or max(ids) >= size:
            token = next(token for token in ids if not 0 <= token < size)
            raise ValueError(
                f"token id {token} is outside the vocabulary of {size} (0 to {size - 1})"
            )
        return [self.tokens[token] for token in ids]

    def check_vocabulary(self, what: str, ids: Iterable[int] | None) -> None:
        """Raise ValueError for a token id outside the vocabulary."""
        if (token := max(ids or (), default=0)) >= self.vocab_size:
            end = self.vocab_size - 1
            raise ValueError(f"{what} token id {token}; the vocabulary of the model ends at {end}")

    def logit_rules(
        self, params: SamplingParams, stop_token_ids: frozenset[int]
    ) -> LogitRules | None:
        """Return the rules that the parameters request, or None. May compile a grammar."""
        if self.make_rules is not None:
            rules: LogitRules | None = self.make_rules(params, self, stop_token_ids)
            return rules
        for name in RULE_PARAMETERS:
            if getattr(params, name) != getattr(DEFAULTS, name):
                raise missing(name, "requests/logit_rules")
        return None

    def compile_grammar(self, params: Any, stop_token_ids: tuple[int, ...]) -> Any:
        """Return the compiled grammar of an output that ends with one of `stop_token_ids`."""
        if self.grammars is None:
            raise missing("structured_outputs", "requests/structured.py")
        return self.grammars.compile(params, list(stop_token_ids))

    def chat_prompt(
        self, conversation: Iterable[Message], variables: dict[str, Any], more: Any = None
    ) -> Prompt:
        """Return the prompt of a conversation.

        variables: the chat template and its variables.
        more: the chat_template_kwargs of a caller, which override `variables`.
        """
        variables = template_variables(variables, more)
        text = render(conversation, self.get_tokenizer(), variables)
        return {"prompt": text, "prompt_token_ids": self.encode(text, add_special_tokens=False)}

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("the engine has no tokenizer (skip_tokenizer_init); give token ids")
        return self.tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises ValueError if there are none."""
        tokenizer = self.get_tokenizer()
        try:
            # With verbose=True, a long text prints a warning about indexing errors.
            return list(
                tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
            )
        except (TypeError, UnicodeError):  # text that is not Unicode
            raise ValueError(f"the text cannot be encoded as UTF-8: {text!r:.80}") from None
        except Exception as error:  # tokenizers raises Exception if a text has no token
            raise ValueError(f"the tokenizer cannot encode {text!r:.80}: {error}") from error

    def encode_all(self, texts: list[str]) -> Iterator[list[int]]:
        """Yield the token ids of each text. One call for all texts is much faster than many."""
        if len(texts) > 1:
            options = {"return_attention_mask": False, "return_token_type_ids": False}
            with contextlib.suppress(TypeError, UnicodeError):  # `encode` names the text
                return iter(self.get_tokenizer()(texts, verbose=False, **options)["input_ids"])
        return map(self.encode, texts)


def missing(option: str, file: str) -> ValueError:
    return ValueError(
        f"{option} needs nanovllm/features/{file}, which this copy of nanovllm does not have"
    )
