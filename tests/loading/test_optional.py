"""Places of the package that are deleted: what does not need them works, what does says so."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, random_llm
from quantized_files import quantize_checkpoint

from nanovllm import SamplingParams
from nanovllm.loading.optional import find_optional, load_optional


def delete(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Let the imports of a folder fail as if it did not exist."""
    for name in [name for name in sys.modules if name.startswith(f"{folder}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, folder, None)


def test_without_the_folder_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch, without a limit of threads."""
    make_checkpoint(tmp_path)
    delete(monkeypatch, "nanovllm.backends.cpu")
    llm = random_llm(tmp_path)
    assert llm.engine.runner.thread_limit is nullcontext
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=3), use_tqdm=False)
    words = "attention_backend='numba' needs nanovllm/backends/cpu/backend.py, which this copy"
    with pytest.raises(ValueError, match=words):
        random_llm(tmp_path, attention_backend="numba")


def test_without_tensor_parallelism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path)
    delete(monkeypatch, "nanovllm.features.memory.tensor_parallel")
    random_llm(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    words = "tensor_parallel_size needs nanovllm/features/memory/tensor_parallel/ranks.py, which this copy"
    with pytest.raises(ValueError, match=words):
        random_llm(tmp_path, tensor_parallel_size=2)


def test_without_quantized_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path)
    delete(monkeypatch, "nanovllm.features.formats.quantized_checkpoint")
    random_llm(tmp_path)
    quantize_checkpoint(tmp_path, "awq")
    words = (
        "a checkpoint with the quant_method 'awq' needs "
        "nanovllm/features/formats/quantized_checkpoint.py, which this copy"
    )
    with pytest.raises(ValueError, match=words):
        random_llm(tmp_path)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for a folder that is deleted."""
    delete(monkeypatch, "xxhash")
    delete(monkeypatch, "nanovllm.features.memory.tensor_parallel")
    monkeypatch.delitem(sys.modules, "nanovllm.features.memory.tensor_parallel")
    for load in (find_optional, lambda module: load_optional(module, "an option")):
        with pytest.raises(ImportError, match="xxhash"):
            load("features.memory.tensor_parallel.ranks")
    assert find_optional("features.nothing_of_this_name") is None
