"""Where a checkpoint is found, what its files say, and files that are refused."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from checkpoints import edited, make_checkpoint, random_llm, weights_of
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from wrong_values import GENERATION, POINTER, WRONG

from nanovllm import LLM, SamplingParams
from nanovllm.loading.checkpoint import Checkpoint, find_checkpoint

# Values of the right type, outside the limits.
OUTSIDE = {
    "repetition_penalty": [0, 1e-38],
    "top_p": [0],
    "min_p": [2],
    "max_new_tokens": [0],
    "presence_penalty": [3],
    "frequency_penalty": [-3],
}
OTHER_KINDS = {field: WRONG[kind] for field, kind in {**GENERATION, "eos_token_id": int}.items()}


@pytest.mark.parametrize("field", sorted(OTHER_KINDS.keys() | OUTSIDE.keys()))
@pytest.mark.parametrize("do_sample", [True, False, None])
def test_wrong_values_in_generation_config(
    path: Path, tmp_path, field: str, do_sample: bool | None
) -> None:
    """Also if it is greedy."""
    edited(path, tmp_path)
    for wrong in [*OTHER_KINDS.get(field, ()), *OUTSIDE.get(field, ())]:
        if field == "eos_token_id":
            wrong = [5, wrong]
        text = json.dumps({"do_sample": do_sample, field: wrong})
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"generation_config\.json: {field} must be"):
            Checkpoint(tmp_path).generation_defaults()
    edited(path, tmp_path, eos_token_id="a")
    (tmp_path / "generation_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"/config\.json: eos_token_id must be"):
        Checkpoint(tmp_path).generation_defaults()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_git_lfs_pointer(path: Path, tmp_path, name: str) -> None:
    edited(path, tmp_path)
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(ValueError, match=f"{name} is a git-lfs pointer.*'git lfs pull'"):
        random_llm(tmp_path)


def test_broken_json(path: Path, tmp_path) -> None:
    edited(path, tmp_path)
    for text, word in (
        ("[1]", "must hold an object"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=word):
            random_llm(tmp_path)


MODELS: list[tuple[Any, type[Exception], str]] = [
    ("./missing", ValueError, r"'\./missing'; give .*'qwen3-nano'.*, or 'smollm2-135m'"),
    ("qwen3-nan", ValueError, "no directory 'qwen3-nan'; did you mean 'qwen3-nano'?"),
    ("smollm2", ValueError, "no directory 'smollm2'; did you mean 'smollm2-135m'?"),
    (__file__, ValueError, "is a file"),
    (3, TypeError, "model"),
    ("", ValueError, "empty"),
]


@pytest.mark.parametrize(("model", "error", "words"), MODELS)
def test_models_that_are_no_directory(model: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LLM(model)


def test_files_that_are_missing_or_broken(path: Path, tmp_path) -> None:
    """Each file is added to those before it."""
    config = (path / "config.json").read_bytes()
    for name, content, words in (
        ("notes", b"", r"no config\.json"),
        ("config.json", b"{", "not valid JSON"),
        ("config.json", config, r"no \*\.safetensors"),
        ("pytorch_model.bin", b"\x80", r"Pickled weights \(\*\.bin, .* are not read"),
        ("model.gguf", b"", r"has no \*\.safetensors; convert model\.gguf: pip install"),
        ("model.safetensors", b"not one", "not a readable safetensors file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=words):
            random_llm(tmp_path)
    command = r"pip install gguf && nanovllm convert \S+/model\.gguf model$"
    with pytest.raises(ValueError, match=f"convert model.gguf: {command}"):
        LLM(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter(path: Path, tmp_path, has_config: bool) -> None:
    if has_config:
        (tmp_path / "config.json").write_text((path / "config.json").read_text())
    (tmp_path / "adapter_model.safetensors").touch()
    fields = {"base_model_name_or_path": "Qwen/Qwen3-0.6B", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"LLM\('Qwen/Qwen3-0\.6B', adapter='/.*'\)"):
        LLM(str(tmp_path))


def test_weights_in_the_format_of_mlx(path: Path, tmp_path) -> None:
    """Older versions of MLX write no quantization_config."""
    edited(path, tmp_path, quantization={"group_size": 64, "bits": 4})
    with pytest.raises(
        ValueError, match="quant_method=None is not supported.* quantization='int8'"
    ):
        random_llm(tmp_path)


def test_hub_that_cannot_be_reached(monkeypatch, tmp_path) -> None:
    def offline(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"no route to host.*HF_ENDPOINT.*HF_HOME"):
        LLM("Qwen/Qwen3-0.6B")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="HFValidationError: Repo id must"):
        LLM("what is/this?")


INDEX = "model.safetensors.index.json"
SHARDS = ["model-1.safetensors", "model-2.safetensors"]
# Shards, a stale file in the directory, and the shards that have all tensors. The values of tensors
# that the index reads from another file are wrong.
LAYOUTS: dict[str, tuple[list[str], str | None, list[str]]] = {
    "in a folder": ([f"weights/{x}" for x in SHARDS], "model.safetensors", []),
    "stale shards": (SHARDS, "model-3.safetensors", []),
    "overlaid first": (SHARDS, None, SHARDS[:1]),
    "overlaid last": (SHARDS, None, SHARDS[1:]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_index_decides(path: Path, tmp_path, name: str) -> None:
    """Weights of a stale file were loaded, or a tensor in two files was refused."""
    shards, stale, with_all = LAYOUTS[name]
    edited(path, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    wrong = {key: tensor + 1 for key, tensor in tensors.items()}
    weight_map = {}
    for i, shard in enumerate(shards):
        part = {key: tensors[key] for key in sorted(tensors)[i::2]}
        weight_map |= dict.fromkeys(part, shard)
        (tmp_path / shard).parent.mkdir(exist_ok=True)
        save_file(wrong | part if shard in with_all else part, tmp_path / shard)
    if stale is not None:
        save_file(wrong, tmp_path / stale)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for key, weight in weights_of(random_llm(tmp_path, attention_backend="sdpa")).items():
        assert torch.equal(weight, tensors[key]), key
    (tmp_path / shards[0]).unlink()
    with pytest.raises(ValueError, match=rf"has no {shards[0]}, which {INDEX} names; fetch"):
        random_llm(tmp_path)
    (tmp_path / shards[1]).unlink()
    if stale is not None:  # now the index is left from weights that are not there
        weights = weights_of(random_llm(tmp_path, attention_backend="sdpa"))
        assert all(torch.equal(weight, wrong[key]) for key, weight in weights.items())


@pytest.mark.parametrize("weight_map", [["a"], {"a": 3}])
def test_a_broken_index(path: Path, tmp_path, weight_map: object) -> None:
    edited(path, tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=rf"{INDEX}: weight_map.* must be"):
        random_llm(tmp_path)


def test_generation_config(tmp_path) -> None:
    make_checkpoint(tmp_path)
    for raw, want in (
        ({}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(temperature=0)),
        # Without do_sample, as in many base models and fine-tunes.
        ({"temperature": 0.7, "top_k": 20}, SamplingParams(temperature=0.7, top_k=20)),
        ({"temperature": 0.7, "top_k": None, "min_new_tokens": 0}, SamplingParams(temperature=0.7)),
        (
            {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1},
            SamplingParams(presence_penalty=1.5, frequency_penalty=-0.5, repetition_penalty=1.1),
        ),
        (
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
                "eos_token_id": [3, 4],
            },
            SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        ),
        ({"do_sample": True, "max_new_tokens": 7}, SamplingParams(max_tokens=7)),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(raw))
        llm = random_llm(tmp_path)
        assert llm.get_default_sampling_params() == want
        assert llm.engine.input_processor.eos_token_ids == frozenset(raw.get("eos_token_id", [0]))
    (tmp_path / "generation_config.json").unlink()
    assert random_llm(tmp_path).get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    "weights", [[INDEX, *SHARDS], ["model.safetensors"], [INDEX, "model.safetensors"]], ids=str
)
def test_files_that_are_fetched(tmp_path, monkeypatch, weights: list[str]) -> None:
    """The hub is a list of names. An index may be left from other weights."""
    wanted = {"config.json", "1_Pooling/config.json", *weights}
    others = {"consolidated.safetensors", "original/params.json", "onnx/model.safetensors", "a.bin"}
    others |= {"old.safetensors"} if SHARDS[0] in weights else {"onnx/config.json"}
    weight_map = {"weight_map": {shard: shard for shard in SHARDS}}

    def fetch(name: str, revision: str | None, **patterns: Any) -> str:
        for file in filter_repo_objects(wanted | others, **patterns):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(json.dumps(weight_map))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    for has_weights in (False, True):
        assert find_checkpoint("a/b", weights=has_weights) == tmp_path
        found = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.*")}
        assert found == {x for x in wanted if has_weights or not x.endswith(".safetensors")}


def test_a_cache_that_others_have_filled(path: Path, tmp_path, monkeypatch, caplog) -> None:
    """Offline, huggingface_hub refuses a snapshot if a file that matches is missing."""
    repo, commit = tmp_path / "models--a--b", "0" * 40
    snapshot = repo / "snapshots" / commit
    for folder in (snapshot, repo / "refs", repo / "trees"):
        folder.mkdir(parents=True)
    edited(path, snapshot)
    (repo / "refs" / "main").write_text(commit)
    names = ("config.json", "model.safetensors", "LICENSE.txt", "generation_config.json")
    files = {name: {"size": 1, "blob_id": "0"} for name in names}
    tree = {"format_version": 1, "files": files}
    (repo / "trees" / f"{commit}.json").write_text(json.dumps(tree))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert find_checkpoint("a/b") == find_checkpoint("a/b", commit) == snapshot
    with pytest.raises(ValueError, match="'a/absent' .*HF_HOME"):
        find_checkpoint("a/absent")
    assert "missing (LICENSE.txt, generation_config.json)" in caplog.text
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="such as model.safetensors"):
        LLM("a/b", skip_tokenizer_init=True)
    (snapshot / INDEX).write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(ValueError, match="no model-1.safetensors, which .* names"):
        LLM("a/b", skip_tokenizer_init=True)


def test_embedded_checkpoint_is_hugging_faces(embedded: LLM) -> None:
    """AutoModelForCausalLM and AutoTokenizer load it unchanged and say the same."""
    from transformers import AutoModelForCausalLM

    path = find_checkpoint("qwen3-nano")
    assert (path / "model.safetensors").stat().st_size <= 8_000_000
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    chat = [{"role": "user", "content": "Sort 42, 7, 19"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nSort 42, 7, 19<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids))[0, ids.shape[1] :].tolist()
    ours = embedded.chat(chat, use_tqdm=False)[0]
    assert ours["token_ids"] == out
    assert ours["text"] == "7, 19, 42"
