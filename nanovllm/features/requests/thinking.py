"""Thinking: the part of an output between <think> and </think>, its budget and its separation.

A prompt can open the block, as the chat templates of DeepSeek-R1 and Qwen3.5 do, or the output
begins with <think>. Only this block is thinking: a marker anywhere else is part of the answer.
Markers are found in the text, because a marker can consist of several tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.engine.detokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.engine.input_processor import InputProcessor
    from nanovllm.features.requests.structured import Matcher
    from nanovllm.sampling_params import SamplingParams

START, END = "<think>", "</think>"


def check_markers(input_processor: InputProcessor, what: str) -> Tokenizer:
    """Return the tokenizer. Raises ValueError, naming the option `what`, if it has no markers."""
    if (tokenizer := input_processor.tokenizer) is None:
        raise ValueError(f"{what} needs a tokenizer (skip_tokenizer_init is set)")
    template = str(getattr(tokenizer, "chat_template", None))
    for marker in (START, END):
        token = tokenizer.backend_tokenizer.token_to_id(marker)
        is_known = token is not None and token < input_processor.vocab_size
        if not is_known and marker not in template:
            raise ValueError(
                f"{what} needs a model that thinks between {START} and {END}, and neither the "
                f"vocabulary nor the chat template of this model has {marker}; leave it out"
            )
    return tokenizer


def opened(tokenizer: Tokenizer, prompt: list[int]) -> str | None:
    """Return the text after <think> in a prompt that leaves the block open, or None."""
    text: str = tokenizer.backend_tokenizer.decode(prompt, skip_special_tokens=False)
    _, start, thought = text.rpartition(START)
    return thought if start and END not in thought else None


class Splitter:
    """Separates the thinking and the answer in the text of one output, while the text grows."""

    def __init__(self, is_open: bool) -> None:
        """is_open: whether the prompt opens the block."""
        self.is_open = self.is_thinking = self.has_thought = is_open
        self.has_begun = False  # else the output may still begin with <think>
        self.held = ""  # text that may be the beginning of a marker

    def add(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Add text. Returns what is new in the thinking and in the answer, without the markers."""
        text, self.held = self.held + text, ""
        if not self.has_begun:
            begun = text.lstrip()
            if len(begun) < len(START) and START.startswith(begun) and not is_last:
                self.held = text
                return "", ""
            self.has_begun = True
            if begun.startswith(START):
                text = begun.removeprefix(START)
                self.is_thinking = self.has_thought = True
        if not self.is_thinking:
            return "", text
        thought, end, answer = text.partition(END)
        self.is_thinking = not end
        if not end and not is_last:
            sizes = range(len(END) - 1, 0, -1)
            self.held = next((END[:size] for size in sizes if text.endswith(END[:size])), "")
            thought = text.removesuffix(self.held)
        return thought, answer


@dataclass(frozen=True, eq=False)
class Thinking:
    """The rules of thinking: a budget, and a grammar that only the answer follows."""

    tokenizer: Tokenizer
    end_ids: list[int]  # the tokens of </think>
    limit: float  # tokens of thinking, including those in the prompt


def make_thinking(
    input_processor: InputProcessor, params: SamplingParams, separates: bool
) -> Thinking | None:
    """Return the rules of thinking that the parameters request, if there are any."""
    separates = separates and params.structured_outputs is not None
    budget = params.thinking_token_budget
    limit = math.inf if budget is None or budget < 0 else budget
    if limit == math.inf and not separates:
        return None
    if params.structured_outputs is not None and not separates:
        raise ValueError(
            f"thinking_token_budget={budget} would break the grammar of structured_outputs, which "
            "is of the whole output; give LLM() a reasoning_parser, so that it is of the text alone"
        )
    tokenizer = check_markers(input_processor, "thinking_token_budget")
    end_ids = input_processor.encode(END, add_special_tokens=False)
    return Thinking(tokenizer, end_ids, limit)


class ThinkingOfRow:
    """Follows the thinking of one row."""

    def __init__(self, rules: Thinking, prompt: list[int]) -> None:
        self.rules = rules
        thought = opened(rules.tokenizer, prompt)
        self.splitter = Splitter(thought is not None)
        last = rules.tokenizer.backend_tokenizer.decode(prompt[-32:], skip_special_tokens=False)
        self.is_closed = last.rstrip().endswith(END)  # the template has turned thinking off
        ids = rules.tokenizer.encode(thought, add_special_tokens=False) if thought else []
        self.num_thought = min(len(ids), rules.limit)
        self.num_read = self.answer_start = 0  # output tokens

    def read(self, output: list[int]) -> int | None:
        """Return the token that the budget forces after `output`, which extends the last one."""
        decode = self.rules.tokenizer.backend_tokenizer.decode
        for token in output[self.num_read :]:
            self.num_read += 1
            if token >= 0:  # else the output has ended
                was_thinking = self.splitter.is_thinking
                self.num_thought += was_thinking
                self.splitter.add(decode([token], skip_special_tokens=False))
                self.answer_start = self.num_read if was_thinking else self.answer_start
        place = self.num_thought - self.rules.limit  # among the tokens of </think>
        is_over = self.splitter.is_thinking and 0 <= place < len(self.rules.end_ids)
        return self.rules.end_ids[int(place)] if is_over else None

    def mask(self, matcher: Matcher, output: list[int]) -> bytes | None:
        """Return the mask of the grammar, which does not apply to the thinking."""
        if self.splitter.is_thinking:  # which may not end the output: the text would be missing
            allowed = bytearray(b"\xff" * len(matcher.mask([]) or b""))
            for token in matcher.grammar.end_tokens:
                allowed[token >> 3] &= ~(1 << (token & 7))
            return bytes(allowed)
        mask = matcher.mask(output[self.answer_start :])
        start = self.rules.tokenizer.backend_tokenizer.token_to_id(START)
        if mask is None or output or start is None or self.is_closed:
            return mask
        allowed = bytearray(mask)  # the output may begin with <think>
        allowed[start >> 3] |= 1 << (start & 7)
        return bytes(allowed)
