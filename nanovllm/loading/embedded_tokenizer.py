"""The tokenizer of the embedded model, without the package transformers.

The import of transformers takes about 0.8 times as long as the import of torch, and `python
example.py` needs nothing else from it. All other models use the tokenizer of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from nanovllm.engine.detokenizer import Tokenizer


class EmbeddedTokenizer:
    """The part of a tokenizer that the engine uses. `full` is the tokenizer of transformers."""

    def __init__(self, directory: Path, load_full: Callable[[Path], Tokenizer]) -> None:
        self.directory, self.load_full = directory, load_full
        self.backend_tokenizer = Backend.from_file(str(directory / "tokenizer.json"))
        self.eos_token_id = self.backend_tokenizer.token_to_id("<|im_end|>")

    @cached_property
    def full(self) -> Tokenizer:
        return self.load_full(self.directory)

    def encode(self, text: str, **_: Any) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text).ids  # there are no tokens to add
        return ids

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [found.ids for found in self.backend_tokenizer.encode_batch(texts)]}

    def apply_chat_template(self, messages: list[Any], **variables: Any) -> Any:
        if variables.get("chat_template") or variables.get("continue_final_message"):
            return self.full.apply_chat_template(messages, **variables)
        import jinja2

        source = (self.directory / "chat_template.jinja").read_text(encoding="utf-8")
        template = jinja2.Template(source, trim_blocks=True, lstrip_blocks=True)
        return template.render(variables, messages=messages)
