"""Detokenizer: converts the output tokens of a sequence to text while they are generated.

The text of a token depends on the tokens before it. A character of several tokens is complete with
the last of them, and tokenizers of SentencePiece's kind remove a space only at the start of a text.
DecodeStream of the package tokenizers handles both. vLLM uses it too and gives the same text.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

# Other files use this type too. transformers is only imported when a tokenizer is loaded.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    Tokenizer: TypeAlias = PreTrainedTokenizerFast
else:
    Tokenizer = Any

CONTEXT = 4  # the most tokens that encode one character
MAX_CONTEXT = 24  # tokens of a prompt that are tried


class Detokenizer:
    """Decodes the output of one sequence, whose prompt ends with `prompt_ids`."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: list[int], skip_special_tokens: bool = True
    ) -> None:
        self.tokenizer = tokenizer.backend_tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.kept: dict[int, str] = {}  # special tokens that are not skipped, with their texts
        self.stream = self._make_stream(self._context(prompt_ids))

    def _make_stream(self, context: list[int]) -> Any:
        from tokenizers.decoders import DecodeStream  # the control plane runs without tokenizers

        return DecodeStream(context, self.skip_special_tokens)

    def _context(self, prompt_ids: list[int]) -> list[int]:
        """Return the last tokens of the prompt, or none if the prompt ends within a character.

        A stream that begins with a part of a character would return the text of the prompt.
        """
        for length in range(CONTEXT, MAX_CONTEXT):
            context = prompt_ids[-length:]
            text = self.tokenizer.decode(context, skip_special_tokens=self.skip_special_tokens)
            if not text.endswith("\ufffd"):
                return context
        return []

    def add(self, token_ids: list[int]) -> str:
        """Add output tokens and return the text that is final, without an incomplete character."""
        return "".join(map(self._add_token, token_ids))

    def _add_token(self, token: int) -> str:
        try:
            text = self.stream.step(self.tokenizer, token)
        except Exception as error:
            # After invalid bytes, some decoders change text that was already returned. As in vLLM,
            # the text then continues with this token.
            if not str(error).startswith("Invalid prefix"):
                raise
            self.stream = self._make_stream([])
            text = self.stream.step(self.tokenizer, token)
        return (text or "") + self.kept.get(token, "")
