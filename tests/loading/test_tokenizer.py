"""The tokenizer of an engine, and those that are refused."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import fresh
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto
from wrong_values import POINTER

from nanovllm import LLM, SamplingParams
from nanovllm.loading.checkpoint import find_checkpoint
from nanovllm.loading.tokenizer import EmbeddedTokenizer, load_tokenizer

EMBEDDED = find_checkpoint("qwen3-nano")


def test_an_end_token_that_the_model_does_not_have(larger_tokenizer: Path, tmp_path) -> None:
    """No output can end with it, so it is left out."""
    tokenizer = AutoTokenizer.from_pretrained(larger_tokenizer)
    tokenizer.eos_token = "<|more|>"
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(dtype="float32", device="cpu", tokenizer=str(tmp_path), num_kv_cache_blocks=64)
    assert llm.engine.input_processor.eos_token_ids == {1033, 1035}
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=2)
    assert llm.generate("What is 12 + 30?\n", params, use_tqdm=False)[0]["text"] == "12 + 30 = 42"


BROKEN = ["", "{", "[]", "null", "[" * 100_000, "\xff", POINTER]


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:8])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_tokenizer(path: Path, tmp_path, name: str, text: str) -> None:
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=name):
        LLM(str(tmp_path))


REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "Ġ"}
LLAMA_2 = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "Ġ"}, REPLACE]}
PARTS: dict[str, dict[str, Any]] = {
    "SmolLM2": {"pre_tokenizer": {"type": "Digits", "individual_digits": True}},
    "CodeQwen1.5": {"pre_tokenizer": None, "normalizer": REPLACE, "decoder": {"type": "Fuse"}},
    "Llama 2": {"pre_tokenizer": None, "normalizer": LLAMA_2, "decoder": {"type": "Fuse"}},
    "lowercase": {"normalizer": {"type": "Lowercase"}},
}
CLASSES = ["GPT2Tokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "T5Tokenizer", None]


@pytest.mark.parametrize("tokenizer_class", CLASSES)
@pytest.mark.parametrize("name", PARTS)
def test_tokenizer_json_decides(tmp_path, name: str, tokenizer_class: str | None) -> None:
    """AutoTokenizer replaces its parts by those of the class in tokenizer_config.json."""
    raw = json.loads((EMBEDDED / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw | PARTS[name]))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": tokenizer_class})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    file, loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tokenizer(tmp_path)
    for text in ("say 12345 6.7", "Ab  c", " a", "a<|im_end|>b c<|im_end|> d", "日本語 🙂"):
        ids = file.encode(text).ids
        assert loaded.encode(text) == ids
        assert loaded.backend_tokenizer.decode(ids) == file.decode(ids)


def test_a_tokenizer_that_cannot_encode(tmp_path) -> None:
    """It was loaded, and requests failed, some with an error that was wrong."""
    words = {"type": "WordLevel", "vocab": {"the": 0}, "unk_token": "?"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": words, "added_tokens": []}))
    with pytest.raises(ValueError, match="WordLevel error.*tokenizer=..."):
        load_tokenizer(tmp_path)


def without_tokenizer_json(path: Path, **fields: str) -> Path:
    """Write the vocabulary as vocab.json and merges.txt."""
    raw = json.loads((EMBEDDED / "tokenizer.json").read_text())
    (path / "vocab.json").write_text(json.dumps(raw["model"]["vocab"]))
    (path / "merges.txt").touch()
    added = {token.pop("id"): token for token in raw["added_tokens"]}
    text = json.dumps({"added_tokens_decoder": added, **fields})
    (path / "tokenizer_config.json").write_text(text)
    return path


@pytest.mark.parametrize("fields", [{"use_cache": "x"}, {"pad_token_id": "x"}], ids=str)
def test_a_config_that_transformers_refuses(tmp_path, fields: dict) -> None:
    """It is read with a tokenizer that has no tokenizer.json."""
    shutil.copytree(find_checkpoint("qwen3-nano"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.model")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ValueError, match=f"config.json has a field that .*{min(fields)}"):
        LLM(str(tmp_path))


def test_mistral_common_is_not_used(tmp_path, monkeypatch) -> None:
    """Where it is installed, transformers prefers its tokenizer for models with tekken.json."""
    asked = []

    def uses(path: Path, mistral_format: bool | None = None, **_: object) -> bool:
        asked.append(mistral_format)
        return False

    names = {"mistral": "MistralCommonBackend"}
    monkeypatch.setattr(tokenization_auto, "TOKENIZER_MAPPING_NAMES", names)
    monkeypatch.setattr(tokenization_auto, "_use_mistral_format", uses)
    without_tokenizer_json(tmp_path, tokenizer_class="GPT2Tokenizer")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    with pytest.raises(ValueError, match="instantiate the backend"):  # not made of vocab.json
        load_tokenizer(tmp_path)
    assert asked == [False]


def test_tokenizers_without_tokenizer_json(tmp_path) -> None:
    without_tokenizer_json(tmp_path, tokenizer_class="GPT2Tokenizer")
    assert load_tokenizer(tmp_path).encode("<|im_end|>") == [1035]
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer files \(tokenizer.json, merges.txt"):
        load_tokenizer(tmp_path)
    without_tokenizer_json(tmp_path, tokenizer_class="ByT5Tokenizer")
    with pytest.raises(ValueError, match="is a ByT5Tokenizer, which does not use .* tokenizers"):
        load_tokenizer(tmp_path)


# ---- the tokenizer of the embedded model: the same ids and texts as by transformers ----

TEXTS = [" ", "a", "  two  spaces ", "12345 6.7", "\r\n\t", "\x00", "日本語 🙂", "e\u0301 न\u093f"]
TEXTS += ["<|im_start|>user\n", "<|im_end|><think>\n\n</think>", "<|im_"]


@pytest.fixture(scope="module")
def tokenizer() -> EmbeddedTokenizer:
    return EmbeddedTokenizer(EMBEDDED)


def test_ids_equal_transformers(tokenizer: EmbeddedTokenizer) -> None:
    full, rng = tokenizer.full, random.Random(0)
    texts = TEXTS + ["".join(rng.choices([*TEXTS, "word", ","], k=9)) for _ in range(300)]
    wanted = [full.encode(text) for text in texts]
    assert [tokenizer.encode(text, verbose=False) for text in texts] == wanted
    assert tokenizer(texts, verbose=False)["input_ids"] == wanted
    assert tokenizer.encode("a", add_special_tokens=False) == full.encode("a")
    assert tokenizer.eos_token_id == full.eos_token_id


def test_chats_equal_transformers(tokenizer: EmbeddedTokenizer) -> None:
    roles = ["system", "user", "assistant", "user"]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for i, content in enumerate([*TEXTS, parts]):
        chat = [{"role": role, "content": content} for role in roles[i % 2 : 2 + i % 3]]
        for variables in (
            {},
            {"add_generation_prompt": True},
            {"add_generation_prompt": True, "enable_thinking": False},
            {"tools": None, "chat_template": None, "enable_thinking": None, "x": 0},
            {"chat_template": "{{ messages[0].content }}{{ x }}", "x": False},
            {"continue_final_message": i < len(TEXTS)},
        ):
            if variables.get("continue_final_message") and not str(content).strip():
                continue
            found = tokenizer.apply_chat_template(chat, tokenize=False, **variables)
            assert found == tokenizer.full.apply_chat_template(chat, tokenize=False, **variables)


def test_a_chat_template_that_is_set(embedded: LLM) -> None:
    tokenizer = embedded.get_tokenizer()
    before, tokenizer.chat_template = tokenizer.chat_template, "{{ messages[0].content }}!"
    try:
        [out] = embedded.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
        assert out.prompt == "hi!"
    finally:
        tokenizer.chat_template = before


def test_the_example_does_not_import_transformers() -> None:
    code = """
import sys
from nanovllm import LLM
llm = LLM(dtype="float32", device="cpu", num_kv_cache_blocks=64)
outputs = llm.chat([[{"role": "user", "content": "Reverse cab"}]] * 2, use_tqdm=False)
print([output["text"] for output in outputs], "transformers" in sys.modules)
llm.get_tokenizer()
print("transformers" in sys.modules)
"""
    done = fresh.run(code)
    assert done.stdout.split("\n")[:2] == ["['bac', 'bac'] False", "True"], done
