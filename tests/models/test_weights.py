"""Loading: single and sharded files, random weights, and memory that is held once."""

import json
import math
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from checkpoints import edited, make_checkpoint, random_llm
from hybrid_checkpoints import make_hybrid_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanovllm import SamplingParams
from nanovllm.loading import checkpoint, make_runner, memory
from nanovllm.models.weights import CheckpointTensor, load_weights

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def shard(path: Path, into: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    for i in range(3):
        part = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({n: tensors[n] for n in names[i::3]}, into / part)
    (into / "config.json").write_text((path / "config.json").read_text())


def test_each_file_is_opened_once(path: Path, tmp_path, monkeypatch) -> None:
    """For the head, the headers, the weights and the scales; then closed, also on errors."""
    shard(path, many := tmp_path)
    opened, read = [], []
    safe_open, read_json = checkpoint.safe_open, checkpoint.read_json
    monkeypatch.setattr(
        checkpoint, "safe_open", lambda *a, **k: opened.append(safe_open(*a, **k)) or opened[-1]
    )
    monkeypatch.setattr(checkpoint, "read_json", lambda path: read.append(path) or read_json(path))

    def all_are_closed() -> bool:
        for file in opened:
            with pytest.raises(Exception, match="closed"):
                file.keys()
        return len(opened) == 3

    random_llm(many, kv_cache_dtype="fp8")
    assert all_are_closed()
    assert [path.name for path in read].count("config.json") == 1
    opened.clear()
    config = json.loads((many / "config.json").read_text()) | {"intermediate_size": 8}
    (many / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="misshapen"):
        random_llm(many)
    assert all_are_closed()


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("is_equal", [False, True])
def test_a_head_in_the_file_is_used(flag: bool, is_equal: bool, tmp_path) -> None:
    """As in transformers: both are one tensor if config.json says so and they are equal."""
    make_checkpoint(tmp_path, tie=True)
    edited(tmp_path, tmp_path, tie_word_embeddings=flag)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    if not is_equal:
        head[-1] *= -3  # the first rows are equal
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    llm = random_llm(tmp_path, attention_backend="sdpa")
    model = llm.engine.runner.model
    assert torch.equal(model.lm_head.weight, head)
    assert (model.lm_head.weight is model.embed_tokens) == (flag and is_equal)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    wanted = reference(torch.tensor([[1, 2, 3]])).logits[0, -1].log_softmax(-1)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    found = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].logprobs[0]
    for token, logprob in found.items():
        assert logprob.logprob == pytest.approx(wanted[token].item(), abs=1e-4)


@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True), (None, True)])
def test_a_tied_head_of_a_nested_config(flags: tuple[bool | None, bool], tmp_path) -> None:
    """tie_word_embeddings may stand at one level only."""
    make_hybrid_checkpoint(tmp_path, "F", nested=True, tie_word_embeddings=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for fields, flag in zip((config, config["text_config"]), flags, strict=True):
        fields.pop("tie_word_embeddings")
        if flag is not None:
            fields["tie_word_embeddings"] = flag
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = random_llm(tmp_path)
    assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)


def test_a_missing_head(tmp_path) -> None:
    make_checkpoint(tmp_path, tie=True)
    edited(tmp_path, tmp_path, tie_word_embeddings=False)
    llm = random_llm(tmp_path)
    with pytest.raises(
        ValueError, match=r"no head \(lm_head\.weight\), and tie_word_embeddings .* is false"
    ):
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)


def test_several_wrong_tensors_are_all_named(tmp_path) -> None:
    make_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors |= {name: torch.zeros(1) for name in ("model.extra", "model.norm.weight_scale")}
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="missing") as error:
        random_llm(tmp_path)
    for part in (
        "missing: model.norm.weight",
        "unexpected: model.extra",
        "down_proj.weight is (3, 4)",
        "norm.weight_scale is of a quantized weight, and quantization_config",
    ):
        assert part in str(error.value)


def test_nothing_is_stored_if_a_tensor_does_not_fit(tmp_path) -> None:
    """An error must not come after minutes of loading."""
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, tmp_path / "model.safetensors")
    stored: list[torch.Tensor] = []
    parts = [CheckpointTensor("a", (2,), stored.append), CheckpointTensor("b", (4,), stored.append)]
    path = tmp_path / "model.safetensors"
    fails = pytest.raises(ValueError, match=r"misshapen: b is \(3,\) of F32")
    with safe_open(path, "pt") as file, fails:
        load_weights(parts, {path: file})
    assert not stored


def test_repeated_tensors_and_integers_are_refused(tmp_path) -> None:
    make_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.norm.weight"
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({name: tensors[name]}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=f"in another file: {name} in b.safetensors"):
        random_llm(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    save_file(tensors | {name: tensors[name].to(torch.int8)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=rf"misshapen: {name} is \(64,\) of I8"):
        random_llm(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tie": True, "attention_bias": True},
        {"family": "qwen2", "head_dim": 16},
        {"family": "qwen2", "head_dim": 16, "tie": True},
    ],
    ids=str,
)
def test_weights_that_do_not_fit(tmp_path, monkeypatch, config: dict) -> None:
    """Refused before loading begins; the size is that of the loaded model."""
    make_checkpoint(tmp_path, **config)
    llm = random_llm(tmp_path, attention_backend="sdpa")  # which does not pack the weights
    parts = llm.engine.runner.model.checkpoint_tensors()
    size = sum(4 * math.prod(part.shape) for part in parts)
    load = Mock(side_effect=InterruptedError("loading begins"))
    monkeypatch.setattr(make_runner, "load_weights", load)
    monkeypatch.setattr(memory, "available_host_memory", lambda: size - 1)
    with pytest.raises(
        ValueError, match=r"weights of .* GiB in float32.* free on cpu; dtype=.*end other"
    ):
        random_llm(tmp_path, attention_backend="sdpa")
    monkeypatch.setattr(memory, "available_host_memory", lambda: size)
    with pytest.raises(InterruptedError, match="loading begins"):
        random_llm(tmp_path, attention_backend="sdpa", num_kv_cache_blocks=1)
    monkeypatch.setattr(memory, "available_host_memory", lambda: size // 2 - 1)
    with pytest.raises(ValueError, match="in bfloat16"):
        random_llm(tmp_path, dtype="bfloat16", load_format="dummy")


def test_dummy_weights_need_only_a_config(tmp_path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tokens = [
        random_llm(tmp_path, load_format="dummy", seed=seed).generate(
            [1, 2], GREEDY, use_tqdm=False
        )
        for seed in (1, 1, 2)
    ]
    a, b, c = (t[0]["token_ids"] for t in tokens)
    assert a == b != c
