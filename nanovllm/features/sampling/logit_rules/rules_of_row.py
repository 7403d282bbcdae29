"""The rules of one row. Processors, phrases, grammars and thinking are applied on the host."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.logit_rules import takes_prompt
from nanovllm.engine.thinking import END, START, Splitter, Thinking, opened
from nanovllm.features.sampling.structured import Matcher
from nanovllm.models.sampler import MASKED
from nanovllm.plan import LogitRules, NewRow

NO_END = 2**62  # above every position


class RowRules:
    """The rules of one row, and the tokens of the row if the host needs them."""

    def __init__(self, rules: LogitRules, new_row: NewRow) -> None:
        # Weak, because a row is reused some time after its request has ended. Until then, this must
        # not keep the logits processors in memory.
        self.owner = weakref.ref(rules)
        self.rules = replace(rules, logits_processors=())
        self.row = new_row.row
        self.prompt, self.output = new_row.prompt, list(new_row.output)
        self.phrases = [word for word in rules.bad_words if len(word) > 1]
        self.take_prompt = [takes_prompt(processor) for processor in rules.logits_processors]
        self.matcher = None if rules.grammar is None else Matcher(rules.grammar)
        self.thinking = rules.thinking and ThinkingOfRow(rules.thinking, self.prompt)
        # Whether `output` must be complete before the next token is sampled.
        on_host = self.phrases, self.take_prompt, self.matcher, self.thinking
        self.needs_output = any(map(bool, on_host))
        self.drafts: list[int] = []  # of this step
        # Of the rules at one of the positions of a row with drafts: the drafts before it.
        self.drafts_before: list[int] | None = None
        self.error: Exception | None = None  # raised when the row samples
        # (function that returns a step's tokens, this row's index), if `output` lacks that token.
        self.last: tuple[Callable[[], list[int]], int] | None = None
        allowed = rules.allowed_token_ids  # an array, because there can be thousands
        self.allowed = None if allowed is None else np.array(allowed, np.int64)
        # (token, value added to its logit, first position at which nothing is added)
        self.edits = [(word[0], MASKED, NO_END) for word in rules.bad_words if len(word) == 1]
        min_length = len(new_row.prompt) + rules.min_tokens
        self.edits += [(token, MASKED, min_length) for token in rules.stops]
        self.edits += [(token, value, NO_END) for token, value in rules.logit_bias]

    def at_each_position(self) -> list[RowRules]:
        """Return the rules at the next position, and at the one after each draft."""
        if not self.drafts:
            return [self]
        result = [copy.copy(self) for _ in range(1 + len(self.drafts))]
        matcher = self.matcher and self.matcher.copy()  # it reads one draft after another
        for i, rules in enumerate(result):
            rules.matcher = matcher
            rules.drafts_before = self.drafts[:i]
            rules.output = self.output + rules.drafts_before
        return result

    def must_end(self) -> bool:
        """Return whether the grammar is complete, and the other rules hide all its end tokens."""
        if self.matcher is None or not self.matcher.is_complete:
            return False
        position = len(self.prompt) + len(self.output)
        ends = set(self.matcher.grammar.end_tokens)
        if self.allowed is not None:
            ends.intersection_update(self.allowed.tolist())
        hidden = {t for t, value, end in self.edits if value == MASKED and position < end}
        return ends <= hidden

    def mask(self) -> bytes | None:
        """Return which tokens the grammar allows, as Matcher.mask. None: all tokens."""
        if self.matcher is None:
            return None
        if self.thinking is None:
            return self.matcher.mask(self.output)
        return self.thinking.mask(self.matcher, self.output)

    def apply(self, logits: Tensor) -> None:
        """Apply the rules that need output tokens, in place, to the row's logits [V]."""
        if self.error is not None:
            raise self.error
        for *start, last in self.phrases:
            if self.output[-len(start) :] == start:
                logits[last] = MASKED
        owner = self.owner()
        processors = owner.logits_processors if owner else ()  # None: the request has ended
        for processor, with_prompt in zip(processors, self.take_prompt, strict=False):
            token_ids = (self.prompt, self.output) if with_prompt else (self.output,)
            changed = processor(*map(list, token_ids), logits)
            if changed is None:
                continue  # the processor has changed `logits` in place
            changed = torch.as_tensor(changed)
            if changed.shape != logits.shape:
                raise ValueError(
                    f"the logits processor {processor!r} returned the shape {list(changed.shape)}, "
                    f"not {list(logits.shape)}; return the logits, or change them in place"
                )
            logits.copy_(changed)
        if processors and not (logits < float("inf")).all():
            # The softmax of infinity is NaN: keep only infinite logits. If any is NaN, mask all.
            kept = logits.isposinf() & ~logits.isnan().any()
            logits.copy_(torch.where(kept, 0.0, MASKED))
        if self.thinking and (token := self.thinking.read(self.output)) is not None:
            logits.fill_(MASKED)
            logits[token] = 0


class ThinkingOfRow:
    """Follows the thinking of one row: its budget, and the grammar of the answer after it."""

    def __init__(self, rules: Thinking, prompt: list[int]) -> None:
        self.rules = rules
        thought = opened(rules.tokenizer, prompt)
        self.splitter = Splitter(thought is not None, rules.call_ends)
        last = rules.tokenizer.backend_tokenizer.decode(prompt[-32:], skip_special_tokens=False)
        self.is_closed = last.rstrip().endswith(END)  # the template has turned thinking off
        ids = rules.tokenizer.encode(thought, add_special_tokens=False) if thought else []
        self.num_thought = min(len(ids), rules.limit)
        self.num_read = self.answer_start = 0  # output tokens
        self.answer: list[int] = []  # tokens of the text after </think> in the token that ends it

    def read(self, output: list[int]) -> int | None:
        """Return the token that the budget forces after `output`, which extends the last one."""
        decode = self.rules.tokenizer.backend_tokenizer.decode
        for token in output[self.num_read :]:
            self.num_read += 1
            if token >= 0:  # else the output has ended
                was_thinking = self.splitter.is_thinking
                self.num_thought += was_thinking and not self.splitter.is_in_call
                _, answer = self.splitter.add(decode([token], skip_special_tokens=False))
                if was_thinking:
                    self.answer_start = self.num_read
                if answer and was_thinking:
                    self.answer = self.rules.tokenizer.encode(answer, add_special_tokens=False)
        place = self.num_thought - self.rules.limit  # among the tokens of </think>
        is_thinking = self.splitter.is_thinking and not self.splitter.is_in_call
        is_over = is_thinking and 0 <= place < len(self.rules.end_ids)
        return self.rules.end_ids[int(place)] if is_over else None

    def mask(self, matcher: Matcher, output: list[int]) -> bytes | None:
        """Return the mask of the grammar, which does not apply to the thinking."""
        if self.splitter.is_thinking:  # which may not end the output: the text would be missing
            allowed = bytearray(b"\xff" * len(matcher.mask([]) or b""))
            for token in (*matcher.grammar.end_tokens, *self.wrong_ends(matcher)):
                allowed[token >> 3] &= ~(1 << (token & 7))
            return bytes(allowed)
        mask = matcher.mask([*self.answer, *output[self.answer_start :]])
        start = self.rules.tokenizer.backend_tokenizer.token_to_id(START)
        if mask is None or output or start is None or self.is_closed:
            return mask
        allowed = bytearray(mask)  # the output may begin with <think>
        allowed[start >> 3] |= 1 << (start & 7)
        return bytes(allowed)

    def wrong_ends(self, matcher: Matcher) -> list[int]:
        """Return the tokens that end the thinking with a text that the grammar does not allow."""
        found = []
        for token, text in self.rules.ends:
            _, end, answer = (self.splitter.held + text).partition(END)
            if end and answer:
                ids = self.rules.tokenizer.encode(answer, add_special_tokens=False)
                if matcher.state.validate_tokens(ids) < len(ids):
                    found.append(token)
        return found
