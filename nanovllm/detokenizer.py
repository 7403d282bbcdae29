"""Detokenizer: the text of a token stream, as the tokens come.

Owns: the tokens whose text is not final yet. Given: token ids. A character may span tokens, and until
its last byte is there a decoder shows U+FFFD in its place. So the last U+FFFD is held back: what was
handed out never changes, and put together it is the full decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW = 32  # tokens without a clean end after which one is looked for: only broken bytes get there


class Detokenizer:
    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.window: list[int] = []  # tokens since the last clean end
        self.handed_out = 0  # characters of the window's text

    def add(self, token_ids: list[int]) -> str:
        """The text that these tokens make certain. Amortised O(1) a token."""
        self.window += token_ids
        text = self._decode(self.window)
        clean = not text.endswith("\ufffd")
        new = text[self.handed_out :] if clean else text[self.handed_out : -1]
        self.handed_out += len(new)
        if clean:
            self.window, self.handed_out = [], 0
        elif len(self.window) > WINDOW:
            self._shorten(text)
        return new

    def flush(self) -> str:
        """What is left when no token will follow: an unfinished character is U+FFFD after all."""
        new = self._decode(self.window)[self.handed_out :]
        self.window, self.handed_out = [], 0
        return new

    def _shorten(self, text: str) -> None:
        """Split the window where both sides decode to what they are together."""
        for cut in range(len(self.window) - 1, 0, -1):
            head = self._decode(self.window[:cut])
            if len(head) <= self.handed_out and head + self._decode(self.window[cut:]) == text:
                self.window, self.handed_out = self.window[cut:], self.handed_out - len(head)
                return

    def _decode(self, token_ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(
                token_ids,
                skip_special_tokens=self.skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )
