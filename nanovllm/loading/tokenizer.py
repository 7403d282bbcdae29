"""Loads tokenizers: by the package tokenizers alone where that is the same, else by transformers.

To import transformers takes about half as long as to import torch. A tokenizer.json whose class
adds nothing to it is used directly, and so is a simple chat template. All other tokenizers, chats
and methods use the tokenizer of transformers, which is then loaded.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as JsonTokenizer

from nanovllm.engine.detokenizer import Tokenizer
from nanovllm.models.config import read_json

# The classes of transformers that use tokenizer.json as it is, if tokenizer_config.json has no
# other fields than these.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
PLAIN_FIELDS = {"backend", "is_local", "local_files_only", "model_max_length", "tokenizer_class"}
PLAIN_FIELDS |= {"clean_up_tokenization_spaces", *SPECIAL_TOKENS}
# Variables that a simple chat template may use, whether or not they are defined.
FLAGS = {"add_generation_prompt", "enable_thinking"}
VARIABLES = {"messages", "tools", *FLAGS, *SPECIAL_TOKENS}


class PlainTokenizer:
    """A tokenizer.json with the methods of transformers' tokenizer that the engine uses.

    The results are equal. `full` is transformers' tokenizer, which has all other attributes.
    """

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        """Raise ValueError if the tokenizer is not plain."""
        self.directory = directory
        self.json = JsonTokenizer.from_file(str(directory / "tokenizer.json"))
        self.json.no_truncation()
        self.json.no_padding()
        special = {
            token.content
            for token in self.json.get_added_tokens_decoder().values()
            if token.special
        }
        self.special_tokens = {n: config[n] for n in SPECIAL_TOKENS if config.get(n) is not None}
        names = self.special_tokens.values()
        if config.keys() - PLAIN_FIELDS or not all(n in special for n in names):
            raise ValueError("transformers may change this tokenizer")
        eos = self.special_tokens.get("eos_token")
        self.eos_token_id = None if eos is None else self.json.token_to_id(eos)

    @cached_property
    def full(self) -> Tokenizer:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(self.directory)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # copy and pickle look for methods of the class
        return getattr(self.full, name)

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        if options.keys() - {"verbose"}:
            return list(self.full.encode(text, add_special_tokens=add_special_tokens, **options))
        return list(self.json.encode(text, add_special_tokens=add_special_tokens).ids)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        simple = {"verbose", "return_attention_mask", "return_token_type_ids"}
        if options.keys() - simple or not isinstance(texts, list):
            return self.full(texts, **options)
        return {"input_ids": [encoding.ids for encoding in self.json.encode_batch(texts)]}

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        if options == {"clean_up_tokenization_spaces": False} and isinstance(token_ids, list):
            return str(self.json.decode(token_ids, skip_special_tokens=skip_special_tokens))
        options["skip_special_tokens"] = skip_special_tokens
        return str(self.full.decode(token_ids, **options))

    def apply_chat_template(self, messages: Any, tokenize: bool = True, **variables: Any) -> Any:
        """Render messages that have only a role and a text, if the template is simple."""
        is_simple = all(
            message.keys() == {"role", "content"} and all(type(x) is str for x in message.values())
            for message in messages
        )
        values = {n: v for n, v in variables.items() if n in FLAGS or v not in (None, False)}
        flags = all(n in FLAGS and isinstance(v, bool) for n, v in values.items())
        if tokenize or not messages or not is_simple or not flags or self.template is None:
            return self.full.apply_chat_template(messages, tokenize=tokenize, **variables)
        return self.template.render(messages=messages, **self.special_tokens | values)

    @cached_property
    def template(self) -> jinja2.Template | None:
        """The chat template, compiled as transformers does, or None if it is not simple."""
        path = self.directory / "chat_template.jinja"
        if not path.is_file() or (self.directory / "additional_chat_templates").exists():
            return None
        source = path.read_text(encoding="utf-8")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals.clear()  # transformers replaces some of them
        try:
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError:
            return None  # transformers reports it, or has the extension that it needs
        is_simple = names <= VARIABLES and "tojson" not in source
        return environment.from_string(source) if is_simple else None


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer in `directory`. Raises ValueError if it cannot be used."""
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
        if kind in PLAIN_CLASSES and (tokenizer := find_plain(directory, raw)) is not None:
            return tokenizer
        from transformers import AutoTokenizer

        loaded: Tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
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


def find_plain(directory: Path, config: dict[str, Any]) -> Any:
    """Return a PlainTokenizer, or None if transformers may change what tokenizer.json says."""
    model = directory / "config.json"
    # transformers changes some tokenizers of Mistral.
    if not model.is_file() or read_json(model).get("model_type") not in ("qwen2", "qwen3", "llama"):
        return None
    try:
        return PlainTokenizer(directory, config)
    except Exception:  # transformers reports what is wrong
        return None
