"""Tokenizers by the package tokenizers alone, where this is the same as transformers.

To import transformers takes about half as long as to import torch. A tokenizer.json whose class
adds nothing to it is used directly, and so are most chat templates. All other tokenizers, chats and
methods use the tokenizer of transformers, which is then loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as JsonTokenizer

from nanovllm.engine.detokenizer import Tokenizer
from nanovllm.models.model_config import read_json

LoadFull: TypeAlias = "Callable[[Path], Tokenizer]"  # loads the tokenizer of transformers

# For other models transformers may use a special class, or change the rules, as for Mistral.
MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe", "llama")
# Classes that use tokenizer.json as it is. For a Qwen2 transformers uses Qwen2Tokenizer instead.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Classes that read the vocabulary, merges and post-processor of the file, and make other rules.
QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_DEFAULTS = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>")
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")
# Other fields of tokenizer_config.json: those that change nothing, and those that must be false.
NEUTRAL_FIELDS = {
    *("backend", "chat_template", "clean_up_tokenization_spaces", "errors", "is_local"),
    *("local_files_only", "model_input_names", "model_max_length", "padding_side"),
    *("tokenizer_class", "added_tokens_decoder", *SPECIAL_TOKENS, *EXTRA_TOKENS),
}
FALSE_FIELDS = {"add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens"}
# The variables that transformers passes to a chat template, and one that the caller may pass.
FLAGS = {"add_generation_prompt", "enable_thinking"}
VARIABLES = {"messages", "tools", "documents", *FLAGS, *SPECIAL_TOKENS}
# Fields of a message that transformers copies to other names.
REASONING = {"reasoning", "reasoning_content", "thinking"}


class PlainTokenizer:
    """A tokenizer.json with the methods of transformers' tokenizer that the engine uses.

    The results are equal. `full` is transformers' tokenizer, which has all other attributes.
    """

    def __init__(
        self, directory: Path, config: dict[str, Any], makes_rules: bool, load_full: LoadFull
    ) -> None:
        """Raise ValueError if the tokenizer is not plain.

        config: the content of tokenizer_config.json.
        makes_rules: the class of transformers is Qwen2Tokenizer.
        """
        self.directory, self.config, self.load_full = directory, config, load_full
        self.json = JsonTokenizer.from_file(str(directory / "tokenizer.json"))
        self.json.no_truncation()
        self.json.no_padding()
        self.backend_tokenizer = self.json
        config = (QWEN_DEFAULTS if makes_rules else {}) | config
        self.special_tokens = {n: config[n] for n in SPECIAL_TOKENS if config.get(n) is not None}
        named = [*self.special_tokens.values()]
        for name in EXTRA_TOKENS:
            named += config.get(name) or []
        special = {
            token.content
            for token in self.json.get_added_tokens_decoder().values()
            if token.special
            and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        }
        is_plain = (
            not config.keys() - NEUTRAL_FIELDS - FALSE_FIELDS
            and not any(config.get(name) for name in FALSE_FIELDS)
            and all(type(t) is str and t in special for t in named)
            and self._has_its_added_tokens()
            and (not makes_rules or self._has_rules_of_qwen())
        )
        if not is_plain:
            raise ValueError("transformers may change this tokenizer")
        eos = self.special_tokens.get("eos_token")
        self.eos_token_id = None if eos is None else self.json.token_to_id(eos)

    def _has_its_added_tokens(self) -> bool:
        """Return whether the other files add no tokens and change none."""
        if (stored := self.config.get("added_tokens_decoder")) is None:
            files = ("special_tokens_map.json", "added_tokens.json")
            return not any((self.directory / name).exists() for name in files)
        wanted = {int(i): repr(AddedToken(**token)) for i, token in stored.items()}
        return wanted == {i: repr(t) for i, t in self.json.get_added_tokens_decoder().items()}

    def _has_rules_of_qwen(self) -> bool:
        """Return whether tokenizer.json has the rules that Qwen2Tokenizer makes."""
        rules, model = self.json, self.json.model
        if not (
            "added_tokens_decoder" in self.config  # otherwise their order may be different
            and isinstance(model, models.BPE)
            and isinstance(rules.normalizer, normalizers.NFC)
            and isinstance(rules.pre_tokenizer, pre_tokenizers.Sequence)
            and isinstance(rules.decoder, decoders.ByteLevel)
            and isinstance(rules.post_processor, processors.ByteLevel | None)
        ):
            return False
        prefix, suffix = model.continuing_subword_prefix, model.end_of_word_suffix
        settings = (model.dropout, model.unk_token, prefix or None, suffix or None)
        flags = (model.fuse_unk, model.byte_fallback, model.ignore_merges)
        split, byte_level = json.loads(rules.pre_tokenizer.__getstate__())["pretokenizers"]
        return (
            not any(flags)
            and settings == (None,) * 4
            and split["type"] == "Split"
            and split["pattern"] == {"Regex": QWEN_SPLIT}
            and (split["behavior"], split["invert"]) == ("Isolated", False)
            and byte_level["type"] == "ByteLevel"
            and not (byte_level["add_prefix_space"] or byte_level["use_regex"])
        )

    @cached_property
    def full(self) -> Tokenizer:
        return self.load_full(self.directory)

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
        name = "clean_up_tokenization_spaces"
        cleans_up = options.get(name, self.config.get(name))
        if not options.keys() - {name} and cleans_up is False and isinstance(token_ids, list):
            return str(self.json.decode(token_ids, skip_special_tokens=skip_special_tokens))
        options["skip_special_tokens"] = skip_special_tokens
        return str(self.full.decode(token_ids, **options))

    def apply_chat_template(self, messages: Any, tokenize: bool = True, **variables: Any) -> Any:
        """Render messages and tools that are JSON, if the template is simple."""
        values = {n: v for n, v in variables.items() if n in FLAGS or v not in (None, False)}
        is_simple = (
            bool(messages)
            and is_json(messages)
            and all(type(m) is dict and not m.keys() & REASONING for m in messages)
            and not any(value is None for message in messages for value in message.values())
            and all(type(v) is bool for n, v in values.items() if n in FLAGS)
            and is_json(tools := values.get("tools"))
            and all(type(tool) is dict for tool in tools or [])
            and values.keys() <= FLAGS | {"tools"}
        )
        if tokenize or not is_simple or self.template is None:
            return self.full.apply_chat_template(messages, tokenize=tokenize, **variables)
        defaults = {"tools": None, "documents": None, "add_generation_prompt": False}
        return self.template.render(defaults | self.special_tokens | values, messages=messages)

    @cached_property
    def template(self) -> jinja2.Template | None:
        """The chat template, compiled as transformers does, or None if it is not simple."""
        path = self.directory / "chat_template.jinja"
        source = self.config.get("chat_template")
        if path.is_file():
            source = path.read_text(encoding="utf-8")
        if type(source) is not str or (self.directory / "additional_chat_templates").exists():
            return None
        extensions = ["jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions
        )
        environment.filters["tojson"] = to_json
        functions = {n: environment.globals[n] for n in ("namespace", "range")}
        functions |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
        others = environment.globals.keys() - functions  # transformers replaces some of them
        environment.globals.clear()  # names in it would not be found
        try:
            tree = environment.parse(source)
            names = jinja2.meta.find_undeclared_variables(tree)
            environment.globals.update(functions)
            template = environment.from_string(source)
        except jinja2.TemplateError:
            return None  # transformers reports it, or has the extension that it needs
        unknown = {n for n in names if n in others or n.endswith(("_token", "_tokens"))} - VARIABLES
        return None if unknown or not has_simple_namespaces(tree) else template


def is_json(value: Any) -> bool:
    """Return whether a value consists of objects that transformers passes to a template as is."""
    if type(value) is dict:
        return all(type(key) is str and is_json(part) for key, part in value.items())
    if type(value) is list:
        return all(map(is_json, value))
    return value is None or type(value) in (str, int, float, bool)


def has_simple_namespaces(tree: nodes.Template) -> bool:
    """Return whether all names in namespaces are public and in the source.

    transformers refuses private names.
    """
    num_calls = 0
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == "namespace":
            num_calls += not (call.args or call.dyn_args or call.dyn_kwargs)
    written = [ref.attr for ref in tree.find_all(nodes.NSRef)]
    written += [keyword.key for keyword in tree.find_all(nodes.Keyword)]
    num_names = sum(name.name == "namespace" for name in tree.find_all(nodes.Name))
    return num_calls == num_names and not any(name.startswith("_") for name in written)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers. Jinja's own escapes HTML."""
    options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def find_plain(directory: Path, config: dict[str, Any], load_full: LoadFull) -> Any:
    """Return a PlainTokenizer, or None if transformers may change what tokenizer.json says.

    config: the content of tokenizer_config.json.
    """
    path, kind = directory / "config.json", config.get("tokenizer_class")
    model_type = read_json(path).get("model_type") if path.is_file() else None
    if model_type not in MODEL_TYPES or kind not in (*PLAIN_CLASSES, *QWEN_CLASSES):
        return None
    makes_rules = model_type == "qwen2" or kind in QWEN_CLASSES
    try:
        return PlainTokenizer(directory, config, makes_rules, load_full)
    except Exception:  # transformers reports what is wrong
        return None
