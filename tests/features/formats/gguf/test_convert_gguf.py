"""GGUF files become checkpoints whose answers are those of the model that was written."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import check_greedy, make_checkpoint, prompts_of, random_llm
from family_checkpoints import make_family_checkpoint
from gguf_files import END, NANO, write_gguf

from nanovllm import LLM, SamplingParams
from nanovllm.__main__ import main
from nanovllm.features.formats.gguf import convert_gguf as module
from nanovllm.features.formats.gguf.convert_gguf import convert
from nanovllm.loading.checkpoint import Checkpoint
from nanovllm.models.rope import RopeConfig

pytestmark = pytest.mark.extra
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.mark.parametrize("quantized", [False, True])
def test_the_embedded_model_comes_back(embedded: LLM, tmp_path, quantized: bool, capsys) -> None:
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
    assert llm.embed("the", use_tqdm=False)[0].prompt_token_ids == [*ids[:1], 1035]
    assert converted.chat_template == (NANO / "chat_template.jinja").read_text()


@pytest.mark.parametrize("bias", [False, True])
def test_reordered_heads(tmp_path, bias: bool) -> None:
    """Llama's q and k have another order in a GGUF file; the shards have an index."""
    fields = dict(vocab_size=1056, tie=True, attention_bias=bias)
    model = make_checkpoint(tmp_path / "llama", "llama", **fields)
    ends = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 0}
    usual = {"attention.causal": True, "rope.scale_linear": 1.0, "general.name": "a reranker"}
    # The name of a blob of Ollama.
    source = write_gguf(tmp_path / "sha256-3f", "llama", tmp_path / "llama", **ends, **usual)
    with pytest.raises(ValueError, match=r"sha256-3f is a file; convert .* nanovllm convert"):
        LLM(str(source))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHARD_BYTES", 100_000)
        convert(source, tmp_path / "out", "float32")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    llm = LLM(str(tmp_path / "out"), dtype="float32", attention_backend="sdpa")
    assert llm.engine.input_processor.eos_token_ids == {0, 5}
    assert llm.engine.checkpoint.config["_name_or_path"] == "a reranker"
    ids = [5, 7, 11, 13, 17, 19]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    check_greedy(model, llm.generate(ids, params, use_tqdm=False))


def test_rope_of_llama_3(tmp_path) -> None:
    """A GGUF file has the divisors of the frequencies; config.json gets what they follow from."""
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_theta": 500_000.0, **scaling}
    make_checkpoint(tmp_path / "llama", "llama", vocab_size=1056, rope_parameters=rope)
    config = Checkpoint(tmp_path / "llama").model_config
    whole, _ = RopeConfig(500_000.0).frequencies(config.head_dim)
    divided, _ = config.rope.frequencies(config.head_dim)
    divisors = (whole / divided).numpy()
    assert 1 == divisors.min() < divisors.max() == 32
    source = write_gguf(tmp_path / "x.gguf", "llama", tmp_path / "llama", divisors=divisors)
    convert(source, tmp_path / "out")
    assert Checkpoint(tmp_path / "out").model_config.rope == config.rope


def test_gemma_3(tmp_path) -> None:
    """Its norms are 1 + w in a GGUF file, and full layers may have a linear rope."""
    rope = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    fields = dict(vocab_size=1056, num_hidden_layers=7, query_pre_attn_scalar=24, **rope)
    pattern = dict(sliding_window_pattern=6)
    model = make_family_checkpoint(tmp_path / "gemma3", "gemma3", **fields | pattern)
    more = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6}
    source = write_gguf(tmp_path / "x.gguf", "gemma3", tmp_path / "gemma3", **more)
    convert(source, tmp_path / "out", "float32")
    llm = random_llm(tmp_path / "out", attention_backend="sdpa")
    assert llm.engine.runner.model.config.windows == (20,) * 5 + (0, 20)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    check_greedy(model, llm.generate(prompts_of(5, 33), params, use_tqdm=False))


FIELDS = {
    "tokenizer": {"tokenizer": "unknown"},
    "rope": {"rope.scaling.type": "yarn"},
    "factor": {"rope.scaling.factor": 4.0},
    "scale": {"rope.scale_linear": 4.0},
    "causal": {"attention.causal": False},
    "pooling": {"pooling_type": 1},
    "unknown": {"logit_scale": 2.0},
    "parts": {"split.count": 3},
}


def broken(path: Path, what: str) -> Path:
    """A GGUF file with a fault."""
    if what == "no file":
        return path
    if what == "text":
        path.write_text("not a model")
        return path
    kind = "gemma" if what == "architecture" else "qwen3"
    more = FIELDS.get(what, {})
    source = NANO
    if what in ("layers", "heads", "few KV heads", "many KV heads"):
        source = path.parent / "changed"
        shutil.copytree(NANO, source)
        config = json.loads((NANO / "config.json").read_text())
        changes = {
            "layers": {"num_hidden_layers": 99},
            "heads": {"num_attention_heads": [4, 4]},
            "few KV heads": {"num_key_value_heads": 1},
            "many KV heads": {"num_key_value_heads": 4},
        }
        (source / "config.json").write_text(json.dumps(config | changes[what]))
    divisors = np.full(5, 8.0, np.float32) if what == "divisors" else None
    write_gguf(path, kind, source, divisors=divisors, **more)
    whole = path.read_bytes()
    if what == "truncated":
        path.write_bytes(whole[:-1000])
    if what == "version":
        path.write_bytes(whole[:4] + b"\1\0\0\0" + whole[8:])
    return path


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no file", "No such file"),
        ("text", "is truncated or not a GGUF file"),
        ("version", "version 1"),
        ("truncated", "is truncated or not a GGUF file"),
        ("architecture", "the architecture 'gemma'; supported are llama, qwen2, qwen3"),
        ("heads", "num_attention_heads must be an int"),
        ("tokenizer", "a tokenizer of the kind 'unknown' with the pre-tokenizer 'qwen2'"),
        ("divisors", "rope_freqs.weight that is not of Llama 3.1"),
        ("rope", "rope.scaling.type 'yarn', which is not supported"),
        ("factor", "rope.scaling.factor 4.0, which is not supported"),
        ("scale", "rope.scale_linear 4.0, which is not supported"),
        ("causal", "attention.causal False, which is not supported"),
        ("pooling", "pooling_type 1, which is not supported"),
        ("unknown", "logit_scale 2.0, which is not supported"),
        ("parts", "is one of 3 parts; merge them with llama-gguf-split --merge"),
        ("layers", "has no tensor 'blk.10"),
        ("few KV heads", "shape (128, 256), but its metadata say (64, 256); download"),
        ("many KV heads", "shape (128, 256), but its metadata say (256, 256); download"),
    ],
)
def test_broken_files(tmp_path, what: str, words: str, capsys) -> None:
    source = broken(tmp_path / "model.gguf", what)
    assert main(["convert", str(source), str(tmp_path / "out")]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_half_done_is_left(tmp_path, monkeypatch) -> None:
    """A full disk, and a directory that exists."""
    source = write_gguf(tmp_path / "nano.gguf", "qwen3", NANO)
    names = {path.name for path in tmp_path.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", full)
        with pytest.raises(OSError, match="no space"):
            convert(source, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == names
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="exists; remove it"):
        convert(source, tmp_path / "out")


def test_without_the_package(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install gguf"):
        convert(tmp_path / "x.gguf", tmp_path / "out")
