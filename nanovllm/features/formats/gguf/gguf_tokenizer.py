"""The tokenizer of a GGUF file.

transformers makes it from the tokens and merges of the file, but ignores `tokenizer.ggml.pre`. This
field names the rule that splits a text before the merges. This module applies the rule. Names that
are not listed here are refused, because a wrong rule would give wrong tokens without an error.
`tests/scripts/gguf_tokenizers.py` compares the results with the original tokenizers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import normalizers, pre_tokenizers, processors

if TYPE_CHECKING:
    from nanovllm.features.formats.gguf.convert_gguf import GGUF

# Names of `tokenizer.ggml.pre` for byte-level BPE, which GGUF calls "gpt2".
DIGITS = {"smollm", "starcoder", "refact"}  # each digit is split from its neighbors
WHOLE_TOKENS = {"llama-bpe"}  # a word that is a token is not built by merges
AS_READ = {"qwen2", "deepseek-r1-qwen", "gpt-2"}  # transformers reads these correctly


def read_tokenizer(file: GGUF) -> Any:
    """Return the tokenizer of a file, with the file's chat template.

    Raises ValueError if transformers cannot read it or its kind is not supported.
    """
    kind, pre = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre")
    if kind != "llama" and (kind != "gpt2" or pre not in DIGITS | WHOLE_TOKENS | AS_READ):
        known = ", ".join(sorted(DIGITS | WHOLE_TOKENS | AS_READ))
        raise ValueError(
            f"{file.path} has a tokenizer of the kind {kind!r} with the pre-tokenizer {pre!r}, "
            f"which is not supported; supported are llama, and gpt2 with one of {known}"
        )
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"gguf_file": file.path.name, "mistral_format": False}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(file.path.parent), **options)
    except Exception as error:  # transformers raises errors of many types
        raise ValueError(
            f"transformers cannot read the tokenizer of {file.path}: {error!r:.300}"
        ) from error
    rules = tokenizer.backend_tokenizer
    if kind == "llama":  # SentencePiece, with the normalizer of Llama 2
        has_prefix = file.field("tokenizer.ggml.add_space_prefix") is not False
        prefix = [normalizers.Prepend("▁")] if has_prefix else []
        rules.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
        rules.pre_tokenizer = None
    elif pre in DIGITS:
        rules.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif pre in WHOLE_TOKENS:
        rules.model.ignore_merges = True
    adds_bos = file.field("tokenizer.ggml.add_bos_token")
    if adds_bos is None:  # the default of llama.cpp
        adds_bos = kind == "llama" or pre in WHOLE_TOKENS
    bos = [tokenizer.bos_token] if adds_bos and tokenizer.bos_token is not None else []
    rules.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A"],
        pair=[*bos, "$A", *(f"{token}:1" for token in bos), "$B:1"],
        special_tokens=[(token, tokenizer.bos_token_id) for token in bos],
    )
    tokenizer.chat_template = file.field("tokenizer.chat_template")
    return tokenizer
