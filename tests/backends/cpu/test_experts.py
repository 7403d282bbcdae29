"""The CPU's products with weights of experts, compared with one product for each expert."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.backends import int8
from nanovllm.backends.cpu import experts
from nanovllm.backends.cpu.backend import make_backend
from nanovllm.features.moe.experts import expert_linear
from nanovllm.models.backend import Backend
from nanovllm.models.layers import Linear

CPU = torch.device("cpu")
COUNTS = [
    [1],
    [0, 3, 0, 0, 1],
    [0, 0, 130, 0, 0],
    [2, 1, 65, 64, 3],
    [1] * 60,
    [0] * 59 + [8],
]


def make_experts(backend: Backend, num: int, outputs: int, inputs: int) -> Linear:
    names = {f"experts.{i}.down_proj": outputs for i in range(num)}
    return Linear(inputs, names, backend)


def check(backend: Backend, reference: Backend, counts: list[int], sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    modules = [make_experts(b, len(counts), *sizes) for b in (backend, reference)]
    weight = torch.randn(modules[0].weight.shape) * 0.1
    for module in modules:
        for tensor in module.checkpoint_tensors(""):
            i = int(tensor.name.split(".")[1])
            tensor.store(weight[i * sizes[0] : (i + 1) * sizes[0]])
        module.backend.after_load(module)
    x = torch.randn(sum(counts), sizes[1]).to(backend.dtype)
    ends = torch.tensor(counts).cumsum(0)
    kernels: Any = backend.experts(modules[0])
    assert kernels is experts
    close(kernels.expert_linear(x, modules[0], ends), expert_linear(x, modules[1], ends))


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    atol = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantized(counts: list[int], weights: str, dtype: torch.dtype) -> None:
    plain: Any = {"int8": int8.Int8Backend}.get(weights)
    if plain is None:
        from nanovllm.backends.int4 import Int4Backend as plain
    check(make_backend(CPU, dtype).quantized(weights), plain(CPU, dtype), counts, (64, 96))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("sizes", [(64, 64), (128, 192)], ids=str)
def test_bfloat16(counts: list[int], sizes: tuple[int, int]) -> None:
    backend = make_backend(CPU, torch.bfloat16)
    probe = make_experts(backend, 1, 64, 64)
    probe.weight.zero_()
    backend.after_load(probe)
    if backend.experts(probe) is None:
        pytest.skip("this processor has no kernel for products in bfloat16")
    check(backend, Backend(CPU, torch.bfloat16), counts, sizes)


def test_sizes_that_do_not_fill_blocks() -> None:
    """They stay in the usual layout, or are refused before anything is loaded."""
    backend = make_backend(CPU, torch.bfloat16)
    module = make_experts(backend, 3, 24, 64)
    module.weight.zero_()
    backend.after_load(module)
    assert backend.experts(module) is None
    with pytest.raises(
        ValueError, match=r"a multiple of 64 outputs, and experts.0.down_proj .* 24"
    ):
        make_experts(backend.quantized("int8"), 3, 24, 64)
