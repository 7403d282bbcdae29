"""Loads the tokenizer of a checkpoint."""

import threading
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import tokenizers

from nanovllm.config import EMBEDDED
from nanovllm.engine.detokenizer import Tokenizer
from nanovllm.utils.json_files import check_fields, read_json

# This lock is held while transformers loads a tokenizer. transformers imports its modules on first
# use, and two threads that import the same module at the same time can fail with ImportError.
LOCK = threading.Lock()


class EmbeddedTokenizer:
    """The tokenizer of the embedded model, without the package transformers.

    It has the attributes that the engine uses. The import of transformers takes about 0.8 times as
    long as the import of torch, and `python example.py` needs nothing else from it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.backend_tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.eos_token_id = self.backend_tokenizer.token_to_id("<|im_end|>")

    @cached_property
    def full(self) -> Tokenizer:
        """The tokenizer of transformers."""
        return load_full(self.directory)

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


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer in `directory`. Raises ValueError if it cannot be used."""
    if directory == Path(__file__).with_name(EMBEDDED):
        return cast("Tokenizer", EmbeddedTokenizer(directory))
    names = ("tokenizer.json", "merges.txt", "tokenizer.model")  # merges.txt is with vocab.json
    if not any((directory / name).is_file() for name in names):
        raise ValueError(
            f"{directory} has no tokenizer files ({', '.join(names)}); name one with "
            "tokenizer=..., or set skip_tokenizer_init=True to work with token ids"
        )
    from huggingface_hub.errors import StrictDataclassError

    try:
        tokenizer = load_full(directory)
        tokenizer.decode(tokenizer.encode("a"))  # A class that does not match may fail only here.
        return tokenizer
    except StrictDataclassError as error:  # transformers also reads the config of the model
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{directory / 'config.json'} has a field that transformers refuses: {reason}; "
            "correct the field, or fetch the file again"
        ) from error
    except Exception as error:  # transformers and tokenizers raise errors of many types
        config = directory / "tokenizer_config.json"
        kind = read_json(config).get("tokenizer_class") if config.is_file() else None
        raise ValueError(
            f"tokenizer.json or tokenizer_config.json in {directory} cannot be used "
            f"with the tokenizer_class {kind!r:.80} ({type(error).__name__}: {error}); fetch them "
            "again, or name another tokenizer with tokenizer=..."
        ) from error


def adds_eos(directory: Path) -> bool:
    """Return whether tokenizer_config.json says that a text ends with the EOS token.

    transformers ignores this field if there is a tokenizer.json, which may not add the token
    (e5-mistral).
    """
    path = directory / "tokenizer_config.json"
    raw = read_json(path) if path.is_file() else {}
    return bool(check_fields(raw, path, {"add_eos_token": (bool, ())}).get("add_eos_token"))


def load_full(directory: Path) -> Tokenizer:
    """Load the tokenizer of transformers. Raises errors of many types."""
    with LOCK:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # For some values of tokenizer_class, AutoTokenizer takes only the vocabulary and the merges
        # of tokenizer.json, and splits and normalizes text by the rules of that class.
        if (directory / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(directory)
        # By default, the package mistral-common is used where it is installed. Its tokenizer reads
        # special tokens in a text letter by letter.
        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, mistral_format=False
        )
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"it is a {type(tokenizer).__name__}, which does not use the package tokenizers"
        )
    return tokenizer
