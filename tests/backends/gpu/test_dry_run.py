"""The CUDA path without a GPU: what dry_run.py finds out in processes of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from family_checkpoints import make_family_checkpoint
from fresh import dry_run, on_model
from moe_checkpoints import make_moe_checkpoint
from safetensors.torch import load_file, save_file

# The scenarios of dry_run.py. Those of a process share the answers of the CPU.
FIRST = ("qwen3", "faults")
OTHERS = ("int8", "int4", "host cache", "ranks", "drafts", "qwen2", "memory", "decode", "bfloat16")
OTHERS += ("smollm3", "gemma3", "invariant", "bfloat16 with fp8", "hybrid experts", "int8 experts")
# Of 32, as in all models.
MULTIPLES = dict(moe_intermediate_size=64, shared_expert_intermediate_size=64)


def scenarios(*names: str) -> pytest.MarkDecorator:
    """Run a test for each scenario, of which all but the first are slow."""
    marks = {name: [] if name in FIRST else [pytest.mark.slow] for name in names}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks[name]) for name in names]
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Callable[[str], Any]:
    """What a scenario found."""
    path = tmp_path_factory.mktemp("dry_run")
    make_checkpoint(path / "qwen3")
    make_checkpoint(path / "qwen2", family="qwen2")
    make_family_checkpoint(path / "smollm3", "smollm3", hidden_size=128)
    make_family_checkpoint(path / "gemma3", "gemma3", hidden_size=128, head_dim=32)
    # A checkpoint with scales of an fp8 KV cache.
    make_checkpoint(path / "scaled")
    file = path / "scaled" / "model.safetensors"
    scales = {f"model.layers.1.self_attn.{kind}_scale": torch.tensor(0.7) for kind in "kv"}
    save_file(load_file(file) | scales, file)
    # As many heads as Qwen3-0.6B, on which the number of splits depends; several chunks of logits.
    make_checkpoint(path / "wide", kv_heads=8, vocab_size=5000)
    make_moe_checkpoint(path / "experts", num_hidden_layers=2, moe_intermediate_size=64)
    make_moe_checkpoint(path / "hybrid experts", hybrid=True, layer_types="LF", **MULTIPLES)
    run = cache(lambda names: dry_run(path, names))
    return lambda name: run(FIRST if name in FIRST else OTHERS)[name]


def test_the_model_of_the_device_finds_faults(found: Callable[[str], Any]) -> None:
    for expected, text in found("faults")["found"]:
        assert expected in text


@scenarios(
    *("qwen3", "qwen2", "int8", "int4", "ranks", "drafts", "host cache", "hybrid experts"),
    *("int8 experts", "smollm3", "gemma3"),
)
def test_tokens_are_those_of_the_cpu_engine(found: Callable[[str], Any], name: str) -> None:
    for run in found(name)["found"]:
        assert run["plain is right"], run["options"]
        assert run["ruled is right"], run["options"]
        if name == "drafts":
            assert 5 < run["accepted_tokens"] < run["drafted_tokens"] - 5
        assert (run["preemptions"] > 0) == (run["options"]["num_kv_cache_blocks"] < 99)


@scenarios("qwen3", "ranks", "host cache", "invariant", "hybrid experts")
def test_the_host_waits_for_tokens_only(found: Callable[[str], Any], name: str) -> None:
    """Without rules; with overlap only when no step is left to launch."""
    for run in found(name)["found"]:
        small = run["options"]["num_kv_cache_blocks"] < 99
        assert (run["host_loads"] > 0) == (name == "host cache" and small)
        waits = run["plain waits"]
        assert all(x.startswith("the last event at nanovllm/models/transfers.py") for x in waits), (
            waits
        )
        if run["options"]["async_scheduling"]:
            assert sum(waits.values()) < 10, waits


@scenarios(
    *("qwen3", "qwen2", "bfloat16", "bfloat16 with fp8", "int8", "int4", "ranks", "drafts"),
    *("invariant", "hybrid experts", "int8 experts", "smollm3", "gemma3"),
)
def test_nothing_is_compiled_while_serving(found: Callable[[str], Any], name: str) -> None:
    for run in found(name)["found"]:
        assert run["variants at start"]
        assert run["variants while serving"] == [], run["options"]


@pytest.mark.slow
def test_an_invariant_engine_has_one_kernel_for_all_products_and_queries(
    found: Callable[[str], Any],
) -> None:
    """Of chunks, decodes and graphs, so that no step decides how a sum is rounded."""
    for run in found("invariant")["found"]:
        kernels = [text.split()[0] for text in run["variants at start"]]
        assert [kernels.count(name) for name in ("_linear", "_attend", "_attend_decode")] == [
            1,
            1,
            0,
        ]


@scenarios(*FIRST, *OTHERS)
def test_ci_compiles_every_variant(found: Callable[[str], Any], name: str) -> None:
    assert found(name)["not compiled"] == []


@pytest.mark.slow
def test_a_steady_decode(found: Callable[[str], Any]) -> None:
    """Nothing waits for the device. Rules are a few launches more."""
    decode = found("decode")["found"]
    assert decode["per layer"] <= 9
    assert decode["outside the layers"] <= 23
    for kind in ("plain", "logprobs", "penalties"):
        assert decode[kind]["waits"] == {}
        assert decode[kind]["launches"] <= decode["plain"]["launches"] + 40


@pytest.mark.slow
def test_the_profile_reserves_what_later_steps_need(found: Callable[[str], Any]) -> None:
    reserved, nothing = found("memory")["found"]
    for what, most in reserved["most"].items():
        assert most <= reserved["memory"], what
    assert max(reserved["read"]) == 512  # tokens, as many as a request can have
    assert max(nothing["most"].values()) > nothing["memory"]


# Fault -> (words of the only warning, whether decodes and chunks are captured, plain attention)
FALLBACKS = {
    "none": ("", True, True, False),
    "no check": ("", True, True, False),
    "T4": ("", True, True, False),
    "V100": ("need compute capability 7.5 or higher", False, False, True),
    "compilation": ("computes silu_and_mul: .*PassManager::run failed", True, True, False),
    "resources": ("computes attend: .*OutOfResources: .*300000", False, False, True),
    "wrong norm": ("computes add_rms_norm: .*the result for the norm has", True, True, False),
    "wrong store": ("computes norm_rope_store: .*the result for q has", True, True, False),
    "wrong attention": ("computes attend: .*the result for decodes", False, False, True),
    "wrong tokens": ("computes sample: ", False, False, False),
    "no C compiler": ("computes everything: .*'/nonexistent'", False, False, True),
    "decodes": ("decodes for 0 of 3 sizes.*not permitted when", False, False, False),
    "chunks": ("chunks for 0 of 16 sizes.*not permitted when", True, False, False),
    "memory of chunks": ("chunks for 0 of 16 sizes.*out of memory", True, False, False),
    "replay": ("without CUDA graphs, .*decodes in a CUDA graph has", False, False, False),
    "replay of chunks": ("steps run without CUDA.*chunks in CUDA graphs has", False, False, False),
    "failed replay": ("without CUDA graphs, .*because invalid handle", False, False, False),
}


@pytest.fixture(scope="module")
def fallbacks(tmp_path_factory) -> Any:
    path = tmp_path_factory.mktemp("fallbacks")
    make_checkpoint(path)
    make_moe_checkpoint(path / "experts", num_hidden_layers=2, moe_intermediate_size=64)
    return on_model([sys.executable, "tests/helpers/fallbacks.py", str(path)])


@pytest.mark.slow
@pytest.mark.parametrize("fault", FALLBACKS)
def test_kernels_and_graphs_that_fail_are_replaced(fallbacks: Any, fault: str) -> None:
    """The answers stay the same, and there is one warning."""
    words, *wanted = FALLBACKS[fault]
    found = fallbacks[fault]
    assert found["tokens"] == fallbacks["none"]["tokens"]
    assert len(found["warnings"]) == bool(words)
    assert all(re.search(words, text) for text in found["warnings"])
    if "computes" in words:
        system = r"model of a GPU \(compute capability 9.0\) with torch 2.*, triton 3"
        assert re.search(f"{system}.*`nanovllm check`", found["warnings"][0])
    assert [found[key] for key in ("decodes", "chunks", "plain attention")] == wanted


@pytest.mark.slow
def test_products_of_layers_and_of_experts_are_one_kernel(fallbacks: Any) -> None:
    """If it fails, attention still has its kernels."""
    found = fallbacks["no products"]
    (text,) = found["warnings"]
    assert "computes linear, expert_mlp: " in text
    assert not found["plain attention"]
    assert found["tokens"] == fallbacks["experts"]["tokens"]


@pytest.mark.slow
def test_the_check_compiles_no_other_kernels(fallbacks: Any) -> None:
    assert fallbacks["none"]["variants"] == fallbacks["no check"]["variants"]
    assert "check_kernels=False" in fallbacks["no check"]["log"]


@pytest.mark.slow
def test_a_gpu_without_instructions_for_fp8(fallbacks: Any) -> None:
    error = fallbacks["A100 with fp8"]["error"]
    assert re.search("needs compute capability 8.9 .* has 8.0; use kv_cache_dtype='auto'", error)


@pytest.mark.slow
def test_kernels_that_fail_may_not_be_replaced(fallbacks: Any) -> None:
    """An option that names the backend is kept, and after an illegal access nothing can run."""
    error = fallbacks["explicit"]["error"]
    assert re.search("the kernel silu_and_mul fails.*PassManager.*'auto'.*'sdpa'", error)
    error = fallbacks["invariant"]["error"]
    assert re.search("kernel linear fails.*batch_invariant=True needs all kernels", error)
    lost = fallbacks["illegal access"]["error"]
    assert re.search("unusable for this process: .*illegal memory.*'sdpa'", lost)


# The most variants of kernels that each file of `pytest -m gpu` compiles: each takes 1 to 2 s.
PARTS = {"kernels": 160, "engines": 60}


@pytest.mark.slow
def test_the_tests_for_a_gpu_pass_on_the_model_of_one() -> None:
    """Without the sizes at which the plain references take minutes, and other numbers of a size."""
    slow = ("151936", "sampler", "bits", "48", "full_pool", "512", "100", "margin", "cache")
    left_out = " and ".join(f"not {name}" for name in (*slow, "(delta_rule and True)"))
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "dry_run_plugin", "-m", "gpu"]
    command += [f"tests/backends/gpu/test_gpu_{part}.py" for part in PARTS]
    without_interpreter = {k: x for k, x in os.environ.items() if k != "TRITON_INTERPRET"}
    places = os.pathsep.join(["tests/helpers", ".ci", "."])
    done = subprocess.run(
        [*command, "-k", left_out],
        env=without_interpreter | {"PYTHONPATH": places},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    for part, most in PARTS.items():
        number = re.search(rf"test_gpu_{part}.py: (\d+) variants", done.stdout)
        assert number is not None
        assert 30 < int(number[1]) <= most
