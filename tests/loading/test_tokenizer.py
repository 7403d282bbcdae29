"""The tokenizer of an engine, and those that are refused."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from wrong_values import POINTER

from nanovllm import LLM, SamplingParams
from nanovllm.loading.checkpoint import find_checkpoint
from nanovllm.loading.tokenizer import load_tokenizer


def test_an_end_token_that_the_model_does_not_have(larger_tokenizer: Path, tmp_path: Path) -> None:
    """No output can end with it, so it is left out."""
    tokenizer = AutoTokenizer.from_pretrained(larger_tokenizer)
    tokenizer.eos_token = "<|more|>"
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(dtype="float32", device="cpu", tokenizer=str(tmp_path), num_kv_cache_blocks=64)
    assert llm.engine.input_processor.eos_token_ids == {1033, 1035}
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=2)
    assert llm.generate("What is 12 + 30?\n", params, use_tqdm=False)[0]["text"] == "12 + 30 = 42"


BROKEN = ["", "{", "[]", "null", "[" * 100_000, "\xff", POINTER]


@pytest.mark.parametrize("text", [*BROKEN, "{}"], ids=lambda text: text[:8])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_tokenizer(path: Path, tmp_path: Path, name: str, text: str) -> None:
    shutil.copytree(find_checkpoint("qwen3-nano"), tmp_path, dirs_exist_ok=True)
    if name == "tokenizer_config.json" and text == "{}":
        text = '{"tokenizer_class": 3}'
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=name):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tokenizer_class": "LayoutLMv3Tokenizer"}, "tokenizer_class 'LayoutLMv3Tokenizer'"),
        ({"tokenizer_class": "CLIPTokenizer"}, "tokenizer_class 'CLIPTokenizer' .*Unk token"),
        ({"tokenizer_class": "T5Tokenizer"}, "tokenizer_class 'T5Tokenizer' .*tokenizer=..."),
    ],
    ids=str,
)
def test_a_tokenizer_that_cannot_encode(tmp_path: Path, fields: dict, word: str) -> None:
    """They were loaded, and requests failed, some with an error that was wrong."""
    for file in find_checkpoint("qwen3-nano").iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = tmp_path / "tokenizer_config.json"
    text = json.dumps(json.loads(config.read_text()) | fields)
    config.unlink()
    config.write_text(text)
    with pytest.raises(ValueError, match=word):
        LLM(str(tmp_path))


def test_mistral_common_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is installed, transformers prefers its tokenizer for models with tekken.json."""
    shutil.copytree(find_checkpoint("qwen3-nano"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))

    def uses(path: Path, mistral_format: bool | None = None, **_: object) -> bool:
        return mistral_format is not False

    module = "transformers.models.auto.tokenization_auto"
    monkeypatch.setattr(f"{module}._use_mistral_format", uses)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<|im_end|>") == [1035]


def test_a_tokenizer_of_another_package(tmp_path: Path) -> None:
    shutil.copytree(find_checkpoint("qwen3-nano"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    with pytest.raises(ValueError, match="is a ByT5Tokenizer, which does not use .* tokenizers"):
        load_tokenizer(tmp_path)
