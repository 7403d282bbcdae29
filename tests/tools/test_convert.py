"""GGUF files become checkpoints whose answers are those of the model that was written."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanovllm import LLM, SamplingParams
from nanovllm.__main__ import main
from nanovllm.tools import convert as module
from nanovllm.tools.convert import FIELDS, NAMES, convert

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.extra
NANO = Path(module.__file__).parents[1] / "loading" / "qwen3-nano"
GREEDY = SamplingParams(temperature=0, max_tokens=24)
END = "<|end|>"
GGUF_NAMES = {theirs: ours for ours, theirs in NAMES.items()}


def reordered(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k as llama.cpp's converter orders them."""
    size = weight.shape[0] // heads
    order = np.arange(len(weight)).reshape(heads, 2, size // 2).swapaxes(1, 2).reshape(-1)
    return weight[order]


def write_gguf(
    path: Path,
    kind: str,
    checkpoint: Path,
    quantized: bool = False,
    tokenizer: str = "gpt2",
    **more: Any,
) -> Path:
    """Write a checkpoint, with a small tokenizer."""
    from safetensors.torch import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    config |= config.get("rope_parameters") or {}
    writer = gguf.GGUFWriter(path, kind)
    for ours, theirs in FIELDS.items():
        if (value := config.get(ours)) is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add = writer.add_array if isinstance(value, list) else add
            add(f"{kind}.{theirs}", value)
    for name, value in more.items():
        writer.add_string(f"{kind}.{name}", value)
    # Bytes, two merges and a special token. The rest are placeholders, as in padded vocabularies.
    tokens = [*bytes_to_unicode().values(), "th", "the", END]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == END else 1 for token in tokens])
    writer.add_token_merges(["t h", "th e"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template((NANO / "chat_template.jinja").read_text())
    weights = {}
    for file in checkpoint.glob("*.safetensors"):
        weights |= load_file(file)
    for name, tensor in weights.items():
        values = tensor.float().numpy()
        short, end = name.removeprefix("model.layers.").rsplit(".", 1)
        number, _, inner = short.partition(".")
        theirs = GGUF_NAMES[inner if name.startswith("model.layers.") else short]
        layer = f"blk.{number}." if name.startswith("model.layers.") else ""
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(theirs)
        if kind == "llama" and heads:
            values = reordered(values, config[heads])
        if quantized and values.ndim == 2 and values.shape[1] % 32 == 0:
            data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(
                f"{layer}{theirs}.{end}", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0
            )
        else:
            writer.add_tensor(f"{layer}{theirs}.{end}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("quantized", [False, True])
def test_the_embedded_model_comes_back(
    embedded: LLM, tmp_path: Path, quantized: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_gguf(tmp_path / "nano.gguf", "qwen3", NANO, quantized)
    assert main(["convert", str(source), str(tmp_path / "out")]) == 0
    assert f"nanovllm chat --model {tmp_path / 'out'}" in capsys.readouterr().out
    llm = LLM(str(tmp_path / "out"), attention_backend="sdpa")
    assert llm.get_default_sampling_params().temperature == 0
    assert all(path.stat().st_mode & 0o044 for path in (tmp_path / "out").iterdir())
    tokenizer = embedded.get_tokenizer()
    prompt = tokenizer.encode("What is 12 + 30?\n")
    token_ids = llm.generate(prompt, GREEDY, use_tqdm=False)[0]["token_ids"]
    assert tokenizer.decode(token_ids).startswith("12 + 30 = 42")
    text = f"the Größe, 你好 🙂 def f(x):\n\treturn 12 + 30 {END}\n"
    converted = llm.get_tokenizer()
    ids = converted.encode(text)
    assert converted.decode(ids) == text
    assert converted.convert_ids_to_tokens(ids[:2]) == ["the", "Ġ"]
    assert converted.convert_tokens_to_ids(END) in ids
    assert converted.chat_template == (NANO / "chat_template.jinja").read_text()


def test_reordered_heads(tmp_path: Path) -> None:
    """Llama's q and k have another order in a GGUF file; the shards have an index."""
    model = make_checkpoint(tmp_path / "llama", "llama", vocab_size=1056, tie=True)
    source = write_gguf(tmp_path / "llama.gguf", "llama", tmp_path / "llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHARD_BYTES", 100_000)
        convert(source, tmp_path / "out", "float32", use_tqdm=False)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    llm = LLM(str(tmp_path / "out"), dtype="float32", attention_backend="sdpa")
    ids = [5, 7, 11, 13, 17, 19]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    got = llm.generate(ids, params, use_tqdm=False)[0]["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *got]])).logits[0]
    assert got == logits[len(ids) - 1 : -1].argmax(dim=1).tolist()


def broken(path: Path, what: str) -> Path:
    """A GGUF file with a fault."""
    if what == "no file":
        return path
    if what == "text":
        path.write_text("not a model")
        return path
    kind = "gemma" if what == "architecture" else "qwen3"
    more = {"rope.scaling.type": "yarn"} if what == "rope" else {}
    source = NANO
    if what == "tokenizer":
        more = {"tokenizer": "unknown"}
    if what in ("layers", "heads"):
        source = path.parent / "changed"
        shutil.copytree(NANO, source)
        config = json.loads((NANO / "config.json").read_text())
        changes = {"layers": {"num_hidden_layers": 99}, "heads": {"num_attention_heads": [4, 4]}}
        (source / "config.json").write_text(json.dumps(config | changes[what]))
    write_gguf(path, kind, source, **more)
    if what == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    return path


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no file", "is not a file"),
        ("text", "not a readable GGUF file"),
        ("truncated", "not a readable GGUF file"),
        ("architecture", "the architecture 'gemma'; supported are llama, qwen2, qwen3"),
        ("heads", "num_attention_heads must be an int"),
        ("tokenizer", "transformers cannot read the tokenizer"),
        ("rope", "rope.scaling.type 'yarn', which is not supported"),
        ("layers", "has no tensor 'model.layers.10"),
    ],
)
def test_broken_files(
    tmp_path: Path, what: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = broken(tmp_path / "model.gguf", what)
    assert main(["convert", str(source), str(tmp_path / "out")]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_half_done_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, and a directory that exists."""
    source = write_gguf(tmp_path / "nano.gguf", "qwen3", NANO)
    names = {path.name for path in tmp_path.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", full)
        with pytest.raises(OSError, match="no space"):
            convert(source, tmp_path / "out", use_tqdm=False)
    assert {path.name for path in tmp_path.iterdir()} == names
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="exists; remove it"):
        convert(source, tmp_path / "out", use_tqdm=False)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install gguf"):
        convert(tmp_path / "x.gguf", tmp_path / "out")
