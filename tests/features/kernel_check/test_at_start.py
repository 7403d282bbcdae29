"""Right kernels pass the comparisons with plain torch, and wrong ones are replaced by it."""

import importlib.util
import itertools
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, random_llm
from moe_checkpoints import make_moe_checkpoint
from wrong_kernels import WRONG

from nanovllm import SamplingParams
from nanovllm.backends import int4, int8
from nanovllm.features.kernel_check import at_start
from nanovllm.features.kernel_check import comparisons as compare
from nanovllm.loading.checkpoint import Checkpoint
from nanovllm.loading.select_backend import pick_backend
from nanovllm.models.backend import Backend
from nanovllm.models.layers import silu_and_mul

CPU = torch.device("cpu")
QUANTIZED: dict[str, Any] = {"int8": int8.quantized, "int4": int4.quantized, "": lambda x: x}
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)
needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="a machine for the GPU's tests may lack it"
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
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
    paths: dict[str, Path], model: str, weights: str, dtype: torch.dtype
) -> None:
    backends = make_backends(weights, dtype)
    config = Checkpoint(paths[model]).model_config
    on_meta = config.model_class().on_meta(config)
    names = []
    for name, comparisons in at_start.checks(backends, on_meta, config.vocab_size, 16, False):
        at_start.check(comparisons, dtype)
        names.append(name)
    wanted = {"add_rms_norm", "norm_rope_store", "attend", "silu_and_mul", "sample"}
    wanted |= {"linear"} if weights else set()
    wanted |= {"delta_rule", "expert_mlp"} if "hybrid" in model else set()
    assert wanted <= set(names)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: "-".join(wrong[1:]))
def test_wrong_kernels_are_caught(wrong: tuple[str, str, str, str], tmp_path, monkeypatch) -> None:
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
            compare.add_rms_norm(backends, 64, dtype),
            compare.activation(backends, "silu_and_mul", 96),
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
        at_start.check(comparisons[name](), dtype)


def test_each_tile_of_a_product_is_compared() -> None:
    tiles = pytest.importorskip("nanovllm.backends.gpu.kernels.linear").HALF
    assert {min(tile for tile in tiles if tile >= rows) for rows in compare.ROWS} == {*tiles}


def test_the_sampler_of_requests_with_rules_is_compared() -> None:
    """Their logits are in float32."""
    plain, wrong = (Backend(CPU, torch.bfloat16) for _ in range(2))
    wrong.sample = lambda x, batch: plain.sample(x, batch) + (x.dtype == torch.float32)  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError, match="48 rows in torch.float32 has a relative error"):
        at_start.check(compare.sample((wrong, plain), 100), torch.bfloat16)


@contextmanager
def filled_memory() -> Iterator[None]:
    """What a kernel does not write is NaN, and not by chance what another test has left there."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@needs_numba
def test_wrong_kernels_of_a_cpu(path: Path, monkeypatch, caplog) -> None:
    """Plain torch with one warning, because it cannot read the packed weights of the others."""
    from nanovllm.backends.cpu.backend import CpuBackend

    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    wanted = random_llm(path, attention_backend="sdpa").generate([[1, 2, 3]], params)
    monkeypatch.setattr(CpuBackend, "is_checked", lambda self: False)
    wrong = staticmethod(lambda x: 1.1 * silu_and_mul(x))
    monkeypatch.setattr(CpuBackend, "silu_and_mul", wrong)
    llm = random_llm(path)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    words = "computes everything: the kernel silu_and_mul fails or is wrong on this .* processor"
    assert re.search(f"{words}.*numba.* error of 0.1, .*`nanovllm check`", record.getMessage())
    found = llm.generate([[1, 2, 3]], params)
    assert found[0]["token_ids"] == wanted[0]["token_ids"]
    with pytest.raises(ValueError, match="the kernel silu_and_mul fails.*'sdpa'"):
        random_llm(path, attention_backend="numba")
    with pytest.raises(ValueError, match="silu_and_mul fails.* needs all kernels; leave it out"):
        random_llm(path, batch_invariant=True)
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        unchecked = random_llm(path, check_kernels=False)
    assert "check_kernels=False" in caplog.text
    assert type(unchecked.engine.runner.backend) is CpuBackend


@needs_numba
def test_kernels_of_a_cpu_are_checked_once(path: Path, tmp_path, monkeypatch) -> None:
    """A file remembers it, next to the code of the kernels."""
    from nanovllm.backends.cpu.backend import CpuBackend

    assert CpuBackend(torch.device("cpu"), torch.float32).checked_marker() is not None
    monkeypatch.setattr(CpuBackend, "checked_marker", lambda self: tmp_path / "checked")
    checked = []
    run = at_start.check

    def recorded(comparisons: Any, dtype: torch.dtype) -> None:
        checked.append(dtype)
        run(comparisons, dtype)

    monkeypatch.setattr(at_start, "check", recorded)
    random_llm(path, attention_backend="numba")
    number = len(checked)
    assert number >= 6
    random_llm(path, attention_backend="numba")
    assert len(checked) == number
