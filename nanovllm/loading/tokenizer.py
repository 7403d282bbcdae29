"""Loads tokenizers: by features/plain_tokenizer.py where that is the same, else by transformers."""

from __future__ import annotations

import threading
from pathlib import Path

from nanovllm.engine.detokenizer import Tokenizer
from nanovllm.models.model_config import read_json

# Held while transformers loads a tokenizer. It imports its modules on first use, and two threads
# that import the same module there at the same time can fail with ImportError.
LOCK = threading.Lock()


def load_full(directory: Path) -> Tokenizer:
    """Load the tokenizer of transformers."""
    with LOCK:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # With mistral_format=None, the package mistral-common is used where it is installed. Its
        # tokenizer reads special tokens in a text letter by letter.
        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, mistral_format=False
        )
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"it is a {type(tokenizer).__name__}, which does not use the package tokenizers"
        )
    return tokenizer


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer in `directory`. Raises ValueError if it cannot be used."""
    from nanovllm.features.plain_tokenizer import find_plain

    names = ("tokenizer.json", "vocab.json", "tokenizer.model")
    if not any((directory / name).is_file() for name in names):
        raise ValueError(
            f"{directory} has no tokenizer files; name one with tokenizer=..., or set "
            "skip_tokenizer_init=True to work with token ids"
        )
    config = directory / "tokenizer_config.json"
    raw = read_json(config) if config.is_file() else {}
    kind, length = raw.get("tokenizer_class"), raw.get("model_max_length")
    if not isinstance(length, int | float | None):
        raise ValueError(f"{config}: model_max_length must be a number, not {length!r:.80}")
    try:
        if (found := find_plain(directory, raw, load_full)) is not None:
            return found
        loaded = load_full(directory)
        loaded.decode(loaded.encode("a"))  # A class that does not match may fail only here.
        return loaded
    except Exception as error:  # transformers and tokenizers raise errors of many types
        for path in sorted(directory.glob("*.json")):
            read_json(path)  # raises ValueError with the name of a broken file
        raise ValueError(
            f"tokenizer.json or tokenizer_config.json in {directory} cannot be used "
            f"with the tokenizer_class {kind!r:.80} ({type(error).__name__}: {error}); fetch them "
            "again, or name another tokenizer with tokenizer=..."
        ) from error
