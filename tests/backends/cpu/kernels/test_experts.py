"""The CPU's mixtures of experts, compared with `expert_mlp` in plain torch."""

import pytest
import torch

from nanovllm.backends import int8
from nanovllm.backends.cpu.backend import make_backend
from nanovllm.backends.cpu.kernels import experts as kernels
from nanovllm.backends.int4 import Int4Backend
from nanovllm.features.models.moe.experts import expert_mlp
from nanovllm.features.models.moe.moe_config import Experts
from nanovllm.features.models.moe.qwen3_moe import SparseMLP
from nanovllm.models.backend import Backend

CPU = torch.device("cpu")
# For each token the experts that it uses, and how many there are.
CHOICES = [
    ([[0]], 1),
    ([[1, 4], [1, 2], [4, 1]], 5),
    ([[2]] * 130, 5),  # all rows belong to one expert
    ([[i % 5, (i // 3 + 1 + i % 5) % 5] for i in range(150)], 5),
    ([[i, 59 - i] for i in range(20)], 60),
    ([[59, 0, 7, 3, 30, 31, 32, 58]], 60),
]


def make_mlp(backend: Backend, num: int, hidden: int, size: int) -> SparseMLP:
    config = Experts(num, 1, size, normalized=True, layers=frozenset())
    mlp, generator = SparseMLP(hidden, config, backend), torch.Generator().manual_seed(0)
    for module in mlp.linears():
        for tensor in module.checkpoint_tensors(""):
            tensor.store(torch.randn(tensor.shape, generator=generator) * 0.1)
    return mlp


def check(backend: Backend, reference: Backend, case: int, sizes: tuple[int, int]) -> None:
    choices, num = torch.tensor(CHOICES[case][0]), CHOICES[case][1]
    mlp, plain = (make_mlp(b, num, *sizes).linears() for b in (backend, reference))
    torch.manual_seed(1)
    x, weights = torch.randn(len(choices), sizes[0]), torch.rand(choices.shape)
    x, weights = x.to(backend.dtype), weights.to(backend.dtype)
    kernel = backend.expert_mlp(*mlp)
    assert kernel is kernels.expert_mlp
    found = kernel(x, weights, choices, *mlp)
    expected = expert_mlp(x, weights, choices, *plain)
    assert found.dtype == expected.dtype
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[found.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", range(len(CHOICES)))
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("sizes", [(128, 64), (50, 21)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantized(case: int, weights: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    plain = {"int8": int8.Int8Backend, "int4": Int4Backend}[weights](CPU, dtype)
    check(make_backend(CPU, dtype).quantized(weights), plain, case, sizes)


@pytest.mark.parametrize("case", range(len(CHOICES)))
@pytest.mark.parametrize("sizes", [(64, 64), (192, 128), (50, 21)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_not_quantized(case: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    check(make_backend(CPU, dtype), Backend(CPU, dtype), case, sizes)
