"""Structured outputs: a grammar determines which tokens may follow at each position of an output.

llguidance (the extra `structured`) compiles a grammar and computes the masks of allowed tokens. A
request has a compiled `Grammar`, and each of its rows has a `Matcher` that follows its output.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.engine.detokenizer import Tokenizer
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.utils.errors import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CACHED_GRAMMARS = 64
# The longest text of each format in bytes, to limit the time of a compilation. The time grows with
# their square, and with their cube where terminals contain each other.
MAX_BYTES = {"json_schema": 2**17, "lark": 2**17, "regex": 2**14, "grammar": 2**14}
# llguidance recurses once per level of a grammar, with at most 1 kB of stack per byte of text.
STACK, STACK_PER_BYTE = 2**24, 2**12
MAX_SECONDS = 60  # for cases without another limit, such as 200 patterns in an allOf
MAX_ABANDONED = 2  # compilations that took longer and cannot be stopped
MAX_REASON = 300  # characters of an error message
# llguidance 1.9 compiles patternProperties, but with declared properties it reaches positions at
# which no token may follow.
PATTERN_PROPERTIES = re.compile(r'"patternProperties"\s*:')
# The whitespace between JSON tokens. If more is allowed, weak models generate nothing but spaces.
WHITESPACE = " ?"
stack_size_lock = threading.Lock()  # threading.stack_size is a setting of the process


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, and the tokens that end an output once it is complete."""

    start: LLMatcher  # in the initial state; each row has a copy
    library_ends: tuple[int, ...]  # the end tokens of llguidance
    end_tokens: tuple[int, ...]  # the end tokens of the request; may be empty


class Matcher:
    """Follows the output of one row through a grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.state = grammar.start.deep_copy()
        self.num_read = 0  # tokens of the output that `state` has read
        self.is_complete = False  # whether nothing but an end token may follow

    def copy(self) -> Matcher:
        """Return a matcher of the same output, which continues separately."""
        other = copy.copy(self)
        other.state = self.state.deep_copy()
        return other

    def mask(self, output: list[int]) -> bytes | None:
        """Return which tokens may follow `output`, which must extend the output of the last call.

        The mask has one bit for each token, the lowest ids in the lowest bits of the first byte. It
        is None if `output` has ended: with async scheduling one more step runs, and its token is
        dropped. Raises GrammarError if llguidance cannot continue the output.
        """
        state = self.state
        end_tokens = self.grammar.end_tokens
        for token in output[self.num_read :]:
            if token < 0 or token in end_tokens:
                return None
            state.consume_token(token)
            self.num_read += 1
        mask = bytearray(state.compute_bitmask())
        if state.is_error():
            raise GrammarError(
                f"llguidance cannot continue the output after {self.num_read} tokens with the "
                f"grammar of structured_outputs: {reason(state, 'no token may follow')}"
            )
        for token in self.grammar.library_ends:
            mask[token >> 3] &= ~(1 << (token & 7))
        if state.is_accepting():
            self.is_complete = state.is_stopped()
            for token in end_tokens:
                mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)


class GrammarCompiler:
    """Compiles the grammars of one engine, and caches the most recently used grammars.

    Several threads may use it at the same time.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.added_texts: list[str] = []  # of added tokens, as they are and escaped
        self.thinking_ends: list[tuple[int, str]] | None = None  # set by thinking.py on first use
        self.abandoned: list[threading.Thread] = []  # run compilations that no caller waits for
        self.compiled = functools.lru_cache(CACHED_GRAMMARS)(self._compile)

    def compile(self, params: StructuredOutputsParams, end_tokens: list[int]) -> Grammar:
        """Return the grammar of a request that ends with one of `end_tokens`.

        Raises ImportError without llguidance, ValueError without a tokenizer, and ValueError with
        llguidance's reason if it cannot compile the grammar.
        """
        field, kind, text = source(params)
        start = self.compiled(field, kind, text)
        return Grammar(start, tuple(self.vocabulary.eos_tokens), tuple(end_tokens))

    @functools.cached_property
    def vocabulary(self) -> LLTokenizer:
        """The tokens of the model, made for the first grammar."""
        tokenizer: Any = getattr(self.tokenizer, "full", self.tokenizer)  # of transformers
        if tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer (skip_tokenizer_init is set)")
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ImportError(
                f"structured_outputs needs llguidance ({error}): pip install -e '.[structured]'"
            ) from error
        # A tokenizer may have added tokens that its model lacks. They are removed, because
        # llguidance would prefer them to their shorter parts.
        ids = set(tokenizer.get_vocab().values())
        if max(ids) >= self.vocab_size:
            tokenizer = with_tokens_below(self.vocab_size, tokenizer)
        added = [token.content for token in tokenizer.added_tokens_decoder.values()]
        self.added_texts = [
            text for each in added for text in (each, json.dumps(each)[1:-1], re.escape(each))
        ]
        end_tokens = sorted(self.eos_token_ids & ids)
        return from_tokenizer(tokenizer, n_vocab=self.vocab_size, eos_token=end_tokens or None)

    def _compile(self, field: str, kind: Any, text: str) -> LLMatcher:
        vocabulary = self.vocabulary  # which also finds the added tokens
        from llguidance import LLMatcher, LLParserLimits, grammar_from

        def start_matcher() -> LLMatcher:
            if kind == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(
                    text, {"whitespace_pattern": WHITESPACE}
                )
            else:
                grammar = grammar_from(kind, text)
            if any(part in text for part in self.added_texts):
                grammar = without_forcing(grammar)
            limits = LLParserLimits(verbose_errors=False)
            start = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
            start.compute_bitmask()  # detects that no token can be the first
            return start

        size = len(text.encode(errors="surrogatepass"))
        if size > MAX_BYTES[kind]:
            raise ValueError(
                f"the {field} of structured_outputs has {size} bytes; the limit is "
                f"{MAX_BYTES[kind]}"
            )
        if PATTERN_PROPERTIES.search(text):
            raise ValueError(
                f"the {field} of structured_outputs has patternProperties, which is not supported; "
                "declare each property, or describe the object by additionalProperties"
            )
        self.abandoned = [thread for thread in self.abandoned if thread.is_alive()]
        if len(self.abandoned) >= MAX_ABANDONED:
            raise ValueError(
                f"structured_outputs: {MAX_ABANDONED} compilations that took more than "
                f"{MAX_SECONDS} seconds, or that Ctrl-C left, are still running; try again later, "
                "or start a new process"
            )
        try:
            start = self._call_with_limit(start_matcher, STACK + STACK_PER_BYTE * size)
            if start.is_error():
                raise ValueError(reason(start))
        except TimeoutError:
            raise ValueError(
                f"llguidance compiles the {field} of structured_outputs for more than "
                f"{MAX_SECONDS} seconds; simplify it"
            ) from None
        except ValueError as error:
            raise ValueError(
                f"llguidance refuses the {field} of structured_outputs: {error}"
            ) from None
        return start

    def _call_with_limit(self, function: Callable[[], LLMatcher], stack: int) -> LLMatcher:
        """Call `function` in a thread with a stack of `stack` bytes, and return its result.

        Raises TimeoutError after MAX_SECONDS. A thread in llguidance cannot be stopped: after a
        timeout or another error, such as KeyboardInterrupt, it continues and is in `abandoned`.
        """
        result: Future[LLMatcher] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:  # also pyo3's PanicException
                result.set_exception(error)

        thread = threading.Thread(target=run, name="nanovllm grammar", daemon=True)
        try:
            with stack_size_lock:
                before = threading.stack_size(stack)
                try:
                    thread.start()
                finally:
                    threading.stack_size(before)
            return result.result(MAX_SECONDS)
        finally:
            if not result.done():
                self.abandoned.append(thread)


def source(params: StructuredOutputsParams) -> tuple[str, str, str]:
    """Return the name of the field that is set, its format in llguidance, and its text.

    Raises ValueError if `json` is not JSON, and TypeError or ValueError for a wrong `choice`.
    """
    if params.json is not None:
        return "json", "json_schema", schema_text(params.json)
    if params.regex is not None:
        return "regex", "regex", params.regex
    if params.grammar is not None:
        return "grammar", "grammar", params.grammar
    if params.choice is None:
        return "json_object", "json_schema", '{"type": "object"}'
    choice = params.choice
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str | bytes)
    if not is_list or not all(isinstance(text, str) for text in choice):
        raise TypeError(f"choice must be a list of strings, not {choice!r}")
    if not choice:
        raise ValueError("choice is empty; give at least one string")
    # The choices form one terminal. llguidance limits the rules that begin at one position.
    strings = " | ".join(json.dumps(text) for text in choice)
    return "choice", "lark", f"start: CHOICE\nCHOICE: {strings}"


def schema_text(schema: Any) -> str:
    """Return a JSON schema, given as a pydantic model, a dict or a string, as a string."""
    value = schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if isinstance(value, Mapping):
            return json.dumps(value)
    except RecursionError:
        raise ValueError("json is nested too deeply; flatten the schema, or use $ref") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"json={schema!r:.80} is not JSON: {error}") from None
    raise TypeError(
        "json must be a JSON schema, as a dict or a string, or a pydantic model, not "
        f"{schema!r:.80}"
    )


def without_forcing(grammar: str) -> str:
    """Return a grammar in which any tokens may form a text that is the only possible one.

    Otherwise llguidance 1.9 allows only the tokens of its encoding. If the text contains the text
    of an added token, such as <tool_call>, the encoding has this token, which llguidance then
    refuses, because added tokens never match a text.
    """
    if grammar.startswith("{"):
        [parts] = json.loads(grammar)["grammars"]
        is_schema = parts["json_schema"] is not None
        schema = json.dumps(parts["json_schema"])
        grammar = f"start: %json {schema}" if is_schema else parts["lark_grammar"]
    return '%llguidance {"no_forcing": true}\n' + grammar


def with_tokens_below(size: int, tokenizer: Any) -> Any:
    """Return a fast tokenizer without the added tokens whose ids are `size` or more."""
    import transformers
    from tokenizers import Tokenizer as FastTokenizer

    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] < size]
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=FastTokenizer.from_str(json.dumps(parts)))


def reason(matcher: LLMatcher, no_token: str = "it matches no text") -> str:
    """Return the start of llguidance's error, which can repeat a whole grammar.

    `no_token` replaces its error that no token is allowed.
    """
    text = matcher.get_error().partition("\n<backtrace>")[0].removesuffix("\n<non-verbose/>")
    return no_token if "NoExtension" in text else text[:MAX_REASON]
