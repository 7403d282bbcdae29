"""Thinking: the part of an output between <think> and </think>.

`Splitter` separates it from the answer. `Thinking` has its rules, which ThinkingOfRow in
features/sampling/logit_rules/rules_of_row.py applies.

A prompt can open the block, as the chat templates of DeepSeek-R1 and Qwen3.5 do, or the output
begins with <think>. Only this block is thinking: a marker anywhere else is part of the answer. A
tool call ends a block that has no </think>: Qwen3.5 writes such calls.
Markers are found in the text, because a marker can consist of several tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.engine.detokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.engine.input_processor import InputProcessor
    from nanovllm.sampling_params import SamplingParams

START, END = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
BEGUN_CALL = re.compile(CALL + r"\s*(?:[\[{<]|\Z)")  # not a marker in a sentence
# Tokens that a tokenizer has added separate the turns of a prompt, except those with these texts.
TAG = re.compile(r"</?(?:think|tool_call|tool_response)>")
TURN = re.compile(r"\s*\w*\s*<think>(.*)", re.DOTALL)  # with the role
LAST = re.compile(r".*<think>(.*)", re.DOTALL)


def check_markers(inputs: InputProcessor, what: str) -> Tokenizer:
    """Return the tokenizer. Raises ValueError, naming the option `what`, if it has no markers."""
    if (tokenizer := inputs.tokenizer) is None:
        raise ValueError(f"{what} needs a tokenizer (skip_tokenizer_init is set)")
    template = str(getattr(tokenizer, "chat_template", None))
    for marker in (START, END):
        token = tokenizer.backend_tokenizer.token_to_id(marker)
        is_known = token is not None and token < inputs.vocab_size
        if not is_known and marker not in template:
            raise ValueError(
                f"{what} needs a model that thinks between {START} and {END}, and neither the "
                f"vocabulary nor the chat template of this model has {marker}; leave it out"
            )
    return tokenizer


def kept_markers(tokenizer: Tokenizer, separates: bool, has_tools: bool) -> dict[int, str]:
    """Return the markers that are special tokens, which a text usually lacks, and that are parsed.

    separates: whether thinking is separated from the text; its end can be a tool call.
    has_tools: whether the caller parses tool calls.
    """
    if not (separates or has_tools):
        return {}
    rules = tokenizer.backend_tokenizer
    parsed = (START, END, CALL, END_CALL) if separates else (CALL, END_CALL)
    ids = {rules.token_to_id(marker): marker for marker in parsed}
    return {i: marker for i, marker in ids.items() if i is not None and not rules.decode([i])}


def opened(tokenizer: Tokenizer, prompt: list[int]) -> str | None:
    """Return the text after <think> in a prompt that leaves the block open, or None.

    In a prompt with several turns, only a <think> with which the last turn begins counts. Others
    may be quotations in a message.
    """
    rules = tokenizer.backend_tokenizer
    added = rules.get_added_tokens_decoder()
    turns = (i for i in range(len(prompt) - 1, 0, -1) if prompt[i] in added)
    start = next((i for i in turns if not TAG.fullmatch(added[prompt[i]].content)), 0)
    text: str = rules.decode(prompt[start + 1 if start else 0 :], skip_special_tokens=False)
    found = (TURN if start else LAST).match(text)
    return found[1] if found and not (END in found[1] or BEGUN_CALL.search(found[1])) else None


def split_end(text: str, markers: Sequence[str]) -> tuple[str, str]:
    """Split a text before its end that may be the beginning of a marker, which may be empty."""
    for size in range(min(len(text), max(map(len, markers), default=0)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return text[:-size], text[-size:]
    return text, ""


class Splitter:
    """Separates the thinking and the answer in the text of one output, while the text grows."""

    def __init__(self, is_open: bool, call_ends: bool = True, removed: Sequence[str] = ()) -> None:
        """is_open: whether the prompt opens the block.

        call_ends: whether a tool call ends a block that has no </think>.
        removed: markers that are not returned, neither in the thinking nor in the answer.
        """
        self.is_open = self.is_thinking = self.has_thought = is_open
        self.call_ends = call_ends
        self.removed = removed
        self.has_begun = False  # False while the output may still begin with <think>
        # Text that may be the beginning of a marker, or a call in the thinking: until </think> or
        # the end of the output, it is not known whether the call ends the thinking.
        self.held = ""

    @property
    def is_in_call(self) -> bool:
        """Whether the thinking has come to a call, or to more than one character of its marker."""
        held = self.held
        is_begun = held.startswith(CALL) or (len(held) > 1 and CALL.startswith(held))
        return self.is_thinking and self.call_ends and is_begun

    def add(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Add text. Returns what is new in the thinking and in the answer, without the markers."""
        text = self.held + text
        self.held = ""
        if not self.has_begun:
            begun = text.lstrip()
            if len(begun) < len(START) and START.startswith(begun) and not is_last:
                self.held = text
                return "", ""
            self.has_begun = True
            if begun.startswith(START):
                text = begun.removeprefix(START)
                self.is_thinking = self.has_thought = True
        thought, answer = "", text
        if self.is_thinking:
            thought, end, answer = text.partition(END)
            call = BEGUN_CALL.search(thought) if self.call_ends and not end else None
            if call:
                thought, answer = thought[: call.start()], thought[call.start() :]
            self.is_thinking = not end and not (call and is_last)
            if self.is_thinking:
                self.held, answer = answer, ""
        if not is_last and not self.held:
            if self.is_thinking:
                thought, self.held = split_end(thought, (END, CALL, *self.removed))
            else:
                answer, self.held = split_end(answer, self.removed)
        for marker in self.removed:
            thought, answer = thought.replace(marker, ""), answer.replace(marker, "")
        return thought, answer


@dataclass(frozen=True, eq=False)
class Thinking:
    """The rules of thinking: a budget, and a grammar that only the answer follows."""

    tokenizer: Tokenizer
    end_ids: list[int]  # the tokens of </think>
    limit: float  # tokens of thinking, including those in the prompt
    call_ends: bool  # as in Splitter
    ends: list[tuple[int, str]]  # `ends_with_more`, if there is a grammar


def make_thinking(inputs: InputProcessor, params: SamplingParams) -> Thinking | None:
    """Return the rules of thinking that the parameters request, if there are any."""
    # If thinking is separated from the text, the grammar is of the text alone.
    separates = inputs.separates_thinking and params.structured_outputs is not None
    budget = params.thinking_token_budget
    limit = math.inf if budget is None or budget < 0 else budget
    if limit == math.inf and not separates:
        return None
    if params.structured_outputs is not None and not separates:
        raise ValueError(
            f"thinking_token_budget={budget} would break the grammar of structured_outputs, which "
            "is of the whole output; give LLM() a reasoning_parser, so that it is of the text alone"
        )
    tokenizer = check_markers(inputs, "thinking_token_budget")
    end_ids = inputs.encode(END, add_special_tokens=False)
    ends: list[tuple[int, str]] = []
    if separates:
        grammars = inputs.grammars()
        if grammars.thinking_ends is None:
            grammars.thinking_ends = ends_with_more(tokenizer, inputs.vocab_size)
        ends = grammars.thinking_ends
    return Thinking(tokenizer, end_ids, limit, params.structured_outputs is None, ends)


def ends_with_more(tokenizer: Tokenizer, vocab_size: int) -> list[tuple[int, str]]:
    """Return the tokens, with their texts, that may end with </think> and continue."""
    rules = tokenizer.backend_tokenizer
    found = []
    for piece, token in rules.get_vocab(with_added_tokens=True).items():
        if END[-1] in piece[:-1] and token < vocab_size:
            text = rules.decode([token], skip_special_tokens=False)
            heads = (text[: i + 1] for i, letter in enumerate(text[:-1]) if letter == END[-1])
            if any(head.endswith(END) or END.endswith(head) for head in heads):
                found.append((token, text))
    return found
