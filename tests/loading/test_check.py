"""The comparisons of kernels with plain torch: right kernels pass, and wrong ones do not."""

import importlib.util
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from moe_checkpoints import make_moe_checkpoint
from wrong_kernels import WRONG

from nanovllm.backends import int4, int8
from nanovllm.loading import check
from nanovllm.loading import comparisons as compare
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


def make_backends(weights: str, dtype: torch.dtype) -> Any:
    kernels, plain = pick_backend("triton", CPU, dtype, 0), Backend(CPU, dtype)
    kernels, plain = (QUANTIZED[weights](backend) for backend in (kernels, plain))
    vars(plain).update(rounds_inputs=False)  # as the kernels of a GPU
    return kernels, plain


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
) -> None:
    backends = make_backends(weights, dtype)
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


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: "-".join(wrong[1:]))
def test_wrong_kernels_are_caught(
    wrong: tuple[str, str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask, a scale or a row of each Triton kernel."""
    name, kernel, text, replacement = wrong
    file_name = "linear" if name in ("int8", "int4", "experts") else name
    module = importlib.import_module(f"nanovllm.backends.gpu.kernels.{file_name}")
    assert module.__file__ is not None
    before, start, source = Path(module.__file__).read_text().partition(f"\ndef {kernel}(")
    body, end, after = source.partition("\n\n\n")
    assert text in body
    file = tmp_path / "wrong.py"
    file.write_text(before + start + body.replace(text, replacement, 1) + end + after)
    spec = importlib.util.spec_from_file_location("wrong", file)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    monkeypatch.setattr(module, kernel, getattr(copy, kernel))
    weights = name if name in QUANTIZED else "int8" if name == "experts" else ""
    dtype = torch.float32 if weights else torch.float16
    backends = make_backends(weights, dtype)
    heads = (4, 2, 32), dtype, 16, False
    comparisons = {
        "pointwise": lambda: itertools.chain(
            compare.add_rms_norm(backends, 64, dtype), compare.silu_and_mul(backends, 96)
        ),
        "store": lambda: compare.norm_rope_store(backends, *heads),
        "attention": lambda: compare.attend(backends, *heads),
        "sampler": lambda: compare.sample(backends, 2500),
        "int8": lambda: compare.linear(backends, "q_proj", 96, 100),
        "int4": lambda: compare.linear(backends, "q_proj", 96, 100),
        "experts": lambda: compare.expert_mlp(backends, 5, 48, 40),
        "delta_rule": lambda: compare.delta_rule(backends, (2, 4, 16, 24)),
    }
    with filled_memory(), pytest.raises(ArithmeticError, match="has a relative error of"):
        check.check(comparisons[name](), dtype)


@contextmanager
def filled_memory() -> Iterator[None]:
    """What a kernel does not write is NaN, and not by chance what another test has left there."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
