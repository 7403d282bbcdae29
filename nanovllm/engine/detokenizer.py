"""Detokenizer: converts a stream of tokens to text while the tokens are generated.

It stores the tokens whose text is not final. A tokenizer decodes an incomplete character as U+FFFD,
so a U+FFFD at the end is not returned until it is known to be final. The concatenated parts are the
text of all tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

# Other files use this type too. transformers is only imported when a tokenizer is loaded.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Tokenizer: TypeAlias = PreTrainedTokenizerBase
else:
    Tokenizer = Any

# The window is shortened when it has more tokens than this. Only invalid bytes make it so long.
WINDOW = 32


class Detokenizer:
    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.window: list[int] = []  # tokens since the last complete character
        self.num_returned = 0  # returned characters of the window's text

    def add(self, token_ids: list[int]) -> str:
        """Add tokens and return the text that has become final. Amortized O(1) per token."""
        self.window += token_ids
        text = self.decode(self.window)
        clean = not text.endswith("\ufffd")
        new = text[self.num_returned :] if clean else text[self.num_returned : -1]
        self.num_returned += len(new)
        if clean:
            self.window, self.num_returned = [], 0
        elif len(self.window) > WINDOW:
            self._shorten(text)
        return new

    def flush(self) -> str:
        """Return the remaining text. An incomplete character is returned as U+FFFD."""
        new = self.decode(self.window)[self.num_returned :]
        self.window, self.num_returned = [], 0
        return new

    def _shorten(self, text: str) -> None:
        """Drop a returned part of the window if the text is the same when decoded in two parts."""
        for cut in range(len(self.window) - 1, 0, -1):
            head = self.decode(self.window[:cut])
            if len(head) <= self.num_returned and head + self.decode(self.window[cut:]) == text:
                self.window = self.window[cut:]
                self.num_returned -= len(head)
                return

    def decode(self, token_ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(
                token_ids,
                skip_special_tokens=self.skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )
