"""Thinking: the part of an output between <think> and </think>, its budget and its separation.

A prompt can open the block, as the chat templates of DeepSeek-R1 and Qwen3.5 do, or the output
begins with <think>. Only this block is thinking: a marker anywhere else is part of the answer.
Markers are found in the text, because a marker can consist of several tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from nanovllm.engine.detokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.engine.input_processor import InputProcessor

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


class Part(Enum):
    BEGIN = 0  # the output may still begin with <think>
    THINKING = 1
    ANSWER = 2


class Splitter:
    """Separates the thinking and the answer in the text of one output, while the text grows."""

    def __init__(self, is_open: bool) -> None:
        """is_open: whether the prompt opens the block."""
        self.is_open, self.part = is_open, Part.BEGIN
        self.has_thought = is_open
        self.held = ""  # text that may be the beginning of a marker

    @property
    def is_thinking(self) -> bool:
        return self.part is Part.THINKING or (self.part is Part.BEGIN and self.is_open)

    def add(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Add text. Returns what is new in the thinking and in the answer, without the markers."""
        text, self.held = self.held + text, ""
        if self.part is Part.BEGIN:
            begun = text.lstrip()
            if begun.startswith(START):
                text = begun.removeprefix(START)
                self.part, self.has_thought = Part.THINKING, True
            elif is_last or not START.startswith(begun):
                self.part = Part.THINKING if self.is_open else Part.ANSWER
            else:
                self.held = text
                return "", ""
        if self.part is Part.ANSWER:
            return "", text
        thought, end, answer = text.partition(END)
        if end:
            self.part = Part.ANSWER
        elif not is_last:
            sizes = range(len(END) - 1, 0, -1)
            self.held = next((END[:size] for size in sizes if text.endswith(END[:size])), "")
            thought = text.removesuffix(self.held)
        return thought, answer


@dataclass(frozen=True, eq=False)
class Budget:
    """The rule of `thinking_token_budget`."""

    limit: int  # tokens of thinking, those of the prompt included
    tokenizer: Tokenizer
    end_ids: list[int]  # the tokens of </think>

    @classmethod
    def make(cls, input_processor: InputProcessor, limit: int) -> Budget:
        tokenizer = check_markers(input_processor, "thinking_token_budget")
        return cls(limit, tokenizer, input_processor.encode(END, add_special_tokens=False))


class BudgetOfRow:
    """Counts the thinking of one row."""

    def __init__(self, budget: Budget, prompt: list[int]) -> None:
        self.budget = budget
        thought = opened(budget.tokenizer, prompt)
        self.splitter = Splitter(thought is not None)
        ids = budget.tokenizer.encode(thought, add_special_tokens=False) if thought else []
        self.num_thought = min(len(ids), budget.limit)
        self.num_read = 0  # output tokens

    def forced_token(self, output: list[int]) -> int | None:
        """Return the token that must follow `output`, which extends the output of the last call."""
        decode = self.budget.tokenizer.backend_tokenizer.decode
        for token in output[self.num_read :]:
            if token >= 0:  # else the output has ended
                self.num_thought += self.splitter.is_thinking
                self.splitter.add(decode([token], skip_special_tokens=False))
        self.num_read = len(output)
        place = self.num_thought - self.budget.limit  # among the tokens of </think>
        is_over = self.splitter.is_thinking and 0 <= place < len(self.budget.end_ids)
        return self.budget.end_ids[place] if is_over else None
