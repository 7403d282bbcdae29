"""A decode step of a hybrid model in one call equals the model, its states included."""

from typing import Any

import pytest
import torch
from checkpoints import random_llm
from hybrid_checkpoints import make_hybrid_checkpoint

from nanovllm import SamplingParams
from nanovllm.backends.cpu.kernels import fused_layers
from nanovllm.backends.cpu.kernels.delta_layers import HybridLayers


# The 264 projections of linear attention in the second case do not fill whole blocks.
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("layers", "heads", "size", "weights"),
    [("LLFLF", 32, 64, None), ("LF", 4, 1024, None), ("LF", 4, 96, "int8"), ("LF", 4, 96, "int4")],
)
def test_one_call_is_the_model(
    tmp_path, layers: str, heads: int, size: int, weights: str | None, dtype: torch.dtype
) -> None:
    make_hybrid_checkpoint(tmp_path, layers, heads, hidden_size=size, intermediate_size=128)
    options: dict[str, Any] = {"attention_backend": "numba", "num_kv_cache_blocks": 60}
    options["quantization"] = weights
    llm = random_llm(tmp_path, dtype=str(dtype)[6:], max_num_seqs=20, **options)
    runner = llm.engine.runner
    model, fused, states = runner.model, runner.fused_model, runner.states
    assert isinstance(fused, HybridLayers)
    near = dict(atol=0.1, rtol=0.05) if dtype is torch.bfloat16 else dict(atol=2e-5, rtol=1e-4)

    class Both:
        logits = model.logits

        @staticmethod
        def forward(batch: Any, attention: Any) -> torch.Tensor:
            tensors = states.conv, states.rule
            before = [tensor.clone() for tensor in tensors]
            found = fused.forward(batch, attention), *(tensor.clone() for tensor in tensors)
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
            wanted = model.forward(batch, attention)
            for one, other in zip(found, (wanted, *tensors), strict=True):
                torch.testing.assert_close(one, other, equal_nan=True, **near)
            return wanted

    calls: list[int] = []
    compiled = fused_layers.compute_layers
    runner.fused_model = Both
    # The rows have other numbers than their places, once some have ended.
    params = [SamplingParams(temperature=0, max_tokens=25 - i, ignore_eos=True) for i in range(17)]
    with pytest.MonkeyPatch.context() as patch:
        counted: Any = lambda *a: (calls.append(a[1].rows), compiled(*a))  # noqa: E731
        patch.setattr(fused_layers, "compute_layers", counted)
        llm.generate([[1 + i] * (3 * i + 1) for i in range(17)], params, use_tqdm=False)
    assert {1, 2, 15, 16, 17} <= set(calls)
