"""The tokenizer of an engine, and those that are refused."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from wrong_values import POINTER

from nanovllm import LLM, SamplingParams
from nanovllm.loading.checkpoint import find_checkpoint


def test_an_end_token_that_the_model_does_not_have(
    larger_tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokenizer's end token is known only at the end of loading."""
    tokenizer = AutoTokenizer.from_pretrained(larger_tokenizer)
    tokenizer.eos_token = "<|more|>"
    tokenizer.save_pretrained(tmp_path)
    with caplog.at_level("WARNING", logger="nanovllm"):
        llm = LLM(dtype="float32", device="cpu", tokenizer=str(tmp_path), num_kv_cache_blocks=64)
    assert any("end-of-sequence tokens [1043] are outside" in text for text in caplog.messages)
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
        ({"model_max_length": "x"}, "config.json: model_max_length must be a number, not 'x'"),
        ({"model_max_length": [512]}, r"model_max_length must be a number, not \[512\]"),
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
