"""What transformers ignores in a GGUF file's tokenizer, and the engine does not."""

from pathlib import Path
from typing import Any

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanovllm.features.formats.gguf.convert_gguf import GGUF
from nanovllm.features.formats.gguf.gguf_tokenizer import read_tokenizer

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.extra

# Bytes, one merge, a word that no merge makes, and a special token.
BYTES = [*bytes_to_unicode().values(), "12", "xyz", "<s>"]
PIECES = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "b", "c"]


def tokenizer_of(path: Path, kind: str, pre: str, adds_bos: bool | None = None) -> Any:
    """The tokenizer of a file without weights."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    tokens = BYTES if kind == "gpt2" else PIECES
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token[0] == "<" and len(token) > 1 else 1 for token in tokens])
    if kind == "gpt2":
        writer.add_token_merges(["1 2"])
    else:
        writer.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0, -0.5, -2.0, -2.0])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("<s>"))
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_tokenizer(GGUF(path))


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["x", "y", "z", "12"]),
        ("smollm", ["x", "y", "z", "1", "2"]),
        ("llama-bpe", ["<s>", "xyz", "12"]),
    ],
)
def test_rules_that_split_a_text(tmp_path, pre: str, tokens: list[str]) -> None:
    tokenizer = tokenizer_of(tmp_path / "x.gguf", "gpt2", pre)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("xyz12")) == tokens


@pytest.mark.parametrize(("adds_bos", "starts"), [(None, 0), (False, 0), (True, 1)])
def test_first_token(tmp_path, adds_bos: bool | None, starts: int) -> None:
    tokenizer = tokenizer_of(tmp_path / "x.gguf", "gpt2", "gpt-2", adds_bos)
    assert tokenizer.encode("x").count(tokenizer.bos_token_id) == starts
    assert tokenizer.encode("x", add_special_tokens=False)[0] != tokenizer.bos_token_id
    assert tokenizer.encode("x", "y").count(tokenizer.bos_token_id) == 2 * starts


def test_spaces_of_sentencepiece(tmp_path) -> None:
    tokenizer = tokenizer_of(tmp_path / "x.gguf", "llama", "default")
    tokens = [tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) for text in ("a b", " a")]
    assert tokens == [["<s>", "▁a", "▁", "b"], ["<s>", "▁", "▁a"]]


def test_unknown_rules_are_refused(tmp_path) -> None:
    with pytest.raises(
        ValueError, match="pre-tokenizer 'tekken', which is not supported; .*smollm"
    ):
        tokenizer_of(tmp_path / "x.gguf", "gpt2", "tekken")
