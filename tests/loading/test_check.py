"""The comparisons of kernels with plain torch: right kernels pass, and wrong ones do not."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from moe_checkpoints import make_moe_checkpoint

from nanovllm.backends import int4, int8
from nanovllm.loading import check
from nanovllm.loading.checkpoint import Checkpoint
from nanovllm.loading.select_backend import pick_backend
from nanovllm.models.backend import Backend

CPU = torch.device("cpu")
QUANTIZED: dict[str, Any] = {"int8": int8.quantized, "int4": int4.quantized, "": lambda x: x}
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random checkpoints, by name."""
    path = tmp_path_factory.mktemp("check")
    make_checkpoint(path / "dense")
    sizes = dict(moe_intermediate_size=64, shared_expert_intermediate_size=64)
    make_moe_checkpoint(path / "hybrid experts", hybrid=True, layer_types="LF", **sizes)
    return {name: path / name for name in ("dense", "hybrid experts")}


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "weights", "dtype"),
    [
        ("dense", "", torch.float16),
        ("dense", "int4", torch.float32),
        ("hybrid experts", "", torch.float16),
        ("hybrid experts", "int8", torch.float32),
    ],
)
def test_right_kernels_pass(
    paths: dict[str, Path],
    model: str,
    weights: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (int8, int4):  # the product of a GPU
        monkeypatch.setattr(module, "dynamic", module.weight_only)
    backends: Any = pick_backend("triton", CPU, dtype, 0), Backend(CPU, dtype)
    backends = tuple(QUANTIZED[weights](backend) for backend in backends)
    config = Checkpoint(paths[model]).model_config
    on_meta = config.model_class().on_meta(config)
    names = []
    for name, comparisons in check.checks(backends, on_meta, config.vocab_size, 16, False):
        check.check(comparisons, dtype)
        names.append(name)
    wanted = {"add_rms_norm", "norm_rope_store", "attend", "silu_and_mul", "sample"}
    wanted |= {"linear"} if weights else set()
    wanted |= {"delta_rule", "expert_mlp"} if "hybrid" in model else set()
    assert wanted <= set(names)
