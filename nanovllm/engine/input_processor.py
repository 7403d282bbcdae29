"""InputProcessor: checks the prompts of a caller, encodes them, and makes their requests.

An invalid prompt raises TypeError or ValueError, whose message names the value and says what to do
instead.
"""

from __future__ import annotations

import contextlib
from collections import abc
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanovllm.engine.chat_template import Message, render
from nanovllm.engine.detokenizer import Tokenizer
from nanovllm.engine.progress import Progress
from nanovllm.engine.request import Request, Sample, Task
from nanovllm.engine.sequence import Sequence
from nanovllm.inputs import ParsedPrompt, Prompt, parse_prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import located

if TYPE_CHECKING:
    from nanovllm.features.sampling.structured import GrammarCompiler


@dataclass(eq=False)
class InputProcessor:
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int  # not more than the tokens that the KV cache holds
    eos_token_ids: frozenset[int]
    default_sampling_params: SamplingParams
    seed: int
    max_logprobs: int = 20

    # Set by make_engine. `make_task` checks the parameters of a request, and makes its task.
    make_task: Callable[[InputProcessor, Any], Task] = field(init=False)
    grammars: Callable[[], GrammarCompiler] = field(init=False)

    def check(
        self,
        pairs: abc.Sequence[tuple[Prompt, Any]],
        progress: Progress,
        stream: bool = False,
        names: abc.Sequence[str] = (),
    ) -> list[Request]:
        """Check prompts and their parameters, tokenize the prompts, and make their requests.

        names: of the prompts in error messages; by default prompts[0] and so on, if several.

        Raises ValueError or TypeError if a request can never run. Does not hold the engine's lock,
        because the compilation of a grammar can take seconds.
        """
        tasks: dict[int, Task] = {}  # by the id() of parameters, which `pairs` keeps alive
        parsed: list[tuple[Task, ParsedPrompt]] = []
        requests: list[Request] = []
        numbered = [f"prompts[{i}]: " * (len(pairs) > 1) for i in range(len(pairs))]
        places = [f"{name}: " for name in names] or numbered
        for place, (prompt, params) in zip(places, pairs, strict=True):
            with located(place):
                params = self.default_sampling_params if params is None else params
                if (task := tasks.get(id(params))) is None:
                    task = tasks[id(params)] = self.make_task(self, params)
                parsed.append((task, task.prepare(parse_prompt(prompt))))
        encoded = self.encode_all([text or "" for _, (text, ids) in parsed if ids is None])
        for i, (task, (text, ids)) in enumerate(parsed):
            with located(places[i]):
                token_ids = next(encoded) if ids is None else ids
                if not token_ids:
                    raise ValueError("the prompt is empty; give at least one token")
                self.check_vocabulary("the prompt has", token_ids)
                length = len(token_ids)
                max_length = task.max_length(length, self.max_model_len)
                seq = Sequence("", 0, token_ids, length, max_length)
            seq.result_kind = task.result_kind
            requests.append(Request(task, text, progress, stream, i, samples=[Sample(seq)]))
        return requests

    def check_vocabulary(self, what: str, ids: Collection[int] | None) -> None:
        """Raise ValueError for a token id outside the vocabulary."""
        for token in (min(ids), max(ids)) if ids else ():
            if not 0 <= token < self.vocab_size:
                end = self.vocab_size - 1
                raise ValueError(f"{what} token id {token}; the vocabulary is 0 to {end}")

    def chat_prompt(
        self, conversation: Iterable[Message], variables: dict[str, Any], more: Any = None
    ) -> Prompt:
        """Return the prompt of a conversation; see `render` for the arguments."""
        text = render(conversation, self.get_tokenizer(), variables, more)
        return {"prompt": text, "prompt_token_ids": self.encode(text, add_special_tokens=False)}

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                "the engine has no tokenizer (skip_tokenizer_init): give token ids, and neither "
                "texts nor stop strings or bad words"
            )
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
        if len(texts) > 1 and self.tokenizer is not None:
            options = {"return_attention_mask": False, "return_token_type_ids": False}
            with contextlib.suppress(TypeError, UnicodeError):  # below, the error names the text
                return iter(self.get_tokenizer()(texts, verbose=False, **options)["input_ids"])
        return map(self.encode, texts)
