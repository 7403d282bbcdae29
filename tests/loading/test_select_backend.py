"""A backend that cannot run: plain torch with one warning, or an error if it was asked for."""

import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_llm

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.features.models.moe.moe_config import MoeConfig
from nanovllm.loading import select_backend
from nanovllm.loading.select_backend import pick_backend
from nanovllm.models.model_config import ModelConfig

needs_numba = pytest.mark.skipif(
    find_spec("numba") is None, reason="a machine that only runs the GPU's tests may lack it"
)


@needs_numba
def test_without_numba(path, monkeypatch, caplog) -> None:
    """The same tokens by torch's attention, and one line that says what is missing."""
    prompts = [[1 + (7 * i + n) % 150 for i in range(n)] for n in (1, 5, 40, 80)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    wanted = random_llm(path).generate(prompts, params, use_tqdm=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in [name for name in sys.modules if name.startswith("nanovllm.backends.cpu.")]:
        monkeypatch.delitem(sys.modules, name)
    with caplog.at_level(logging.WARNING, logger="nanovllm"):
        llm = random_llm(path)
    assert "attention runs in plain torch, which is slower" in caplog.text
    found = llm.generate(prompts, params, use_tqdm=False)
    assert [o["token_ids"] for o in found] == [o["token_ids"] for o in wanted]
    for option in ({"attention_backend": "numba"}, {"batch_invariant": True}):
        with pytest.raises(ValueError, match="needs Numba.*pip install numba.*'sdpa'"):
            random_llm(path, **option)


@needs_numba
def test_batch_invariance_waits_for_the_kernels(path: Path, monkeypatch) -> None:
    kernel_files = import_module("nanovllm.backends.cpu.kernel_files")
    monkeypatch.setattr(kernel_files, "is_ready", lambda dtype: False)
    kinds = [
        type(random_llm(path, batch_invariant=option).engine.runner.backend).__name__
        for option in (False, True)
    ]
    assert kinds == ["Backend", "CpuBackend"]


NOT_INVARIANT: list[tuple[dict[str, Any], type, str]] = [
    ({"dtype": "float16"}, ModelConfig, "needs dtype='bfloat16', not 'float16'"),
    ({"quantization": "int4"}, ModelConfig, "needs quantization=None, not 'int4'"),
    ({"kv_cache_dtype": "fp8"}, ModelConfig, "needs kv_cache_dtype='auto', not 'fp8'"),
    ({"tensor_parallel_size": 2}, ModelConfig, "needs tensor_parallel_size=1, not 2"),
    ({}, MoeConfig, "is for dense models, not Qwen3MoeForCausalLM"),
]


@pytest.mark.skipif(find_spec("triton") is None, reason="the choice needs Triton")
@pytest.mark.parametrize(("options", "kind", "words"), NOT_INVARIANT, ids=str)
def test_what_is_not_batch_invariant_on_a_gpu(
    options: dict[str, Any], kind: type[ModelConfig], words: str
) -> None:
    from nanovllm.backends.gpu.backend import GpuBackend

    dtype = getattr(torch, options.get("dtype", "bfloat16"))
    backend, model = GpuBackend(torch.device("cpu"), dtype), object.__new__(kind)
    vars(model).update(architecture="Qwen3MoeForCausalLM")
    with pytest.raises(ValueError, match=f"batch_invariant=True on a GPU {words}; leave"):
        backend.batch_invariant(EngineConfig(batch_invariant=True, **options), model)


@needs_numba
def test_float16_is_not_numbas(tmp_path) -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16, and this is 'cpu' with float16"):
        LLM(dtype="float16", device="cpu", attention_backend="numba")
    answer = LLM(dtype="float16", device="cpu").generate(
        [[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False
    )
    assert len(answer[0]["token_ids"]) == 2


@pytest.mark.parametrize("has_bf16", [True, False])
def test_auto_dtype_on_a_cpu(has_bf16: bool, monkeypatch) -> None:
    """A checkpoint in float32 stays so: smollm2-135m answers wrongly in bfloat16."""
    monkeypatch.setattr(select_backend, "cpu_has_fast_bf16", lambda: has_bf16)
    cpu, fast = torch.device("cpu"), torch.bfloat16 if has_bf16 else torch.float32
    for stored, wanted in {"float32": torch.float32, "bfloat16": fast, "float16": fast}.items():
        assert select_backend.pick_dtype("auto", cpu, stored) is wanted
    assert select_backend.pick_dtype("auto", cpu, None) is fast


# (backend, dtype of a checkpoint in bfloat16, whether chunks of the delta rule have kernels) by
# compute capability.
OLD, TURING = ("Backend", torch.float16, False), ("GpuBackend", torch.float16, False)
AMPERE = ("GpuBackend", torch.bfloat16, True)
NEWER = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
CHOICES: dict[tuple[int, int], tuple[str, torch.dtype, bool]] = {
    **dict.fromkeys([(7, 0), (7, 2)], OLD),
    (7, 5): TURING,
    **dict.fromkeys(NEWER, AMPERE),
}


@pytest.mark.skipif(find_spec("triton") is None, reason="the choice needs Triton")
@pytest.mark.parametrize("capability", CHOICES, ids=str)
def test_the_choice_for_each_capability(capability: tuple[int, int], monkeypatch, caplog) -> None:
    """A GPU that is older than the kernels runs plain torch with one warning."""
    kind, dtype, has_chunks = CHOICES[capability]
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert select_backend.pick_dtype("auto", gpu, "bfloat16") is dtype
    backend = pick_backend("auto", gpu, dtype, 10**9)
    assert type(backend).__name__ == kind
    assert hasattr(backend.delta_rule(), "chunk") == has_chunks
    if kind == "Backend":
        words = f"7.5 or higher, and a GPU has 7.{capability[1]}"
        [message] = caplog.messages
        assert "plain torch, which is slower" in message
        assert words in message
        with pytest.raises(ValueError, match=f"{words}; .*'sdpa'"):
            pick_backend("triton", gpu, dtype, 10**9)
