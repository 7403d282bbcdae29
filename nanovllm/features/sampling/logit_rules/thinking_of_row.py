"""The thinking of a row while it is generated: its budget, and the grammar of the answer."""

from __future__ import annotations

from nanovllm.engine.thinking import END, START, Splitter, Thinking, opened
from nanovllm.features.sampling.structured import Matcher


class ThinkingOfRow:
    """Follows the thinking of one row."""

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
