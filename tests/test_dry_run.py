"""The CUDA path without a GPU: what dry_run.py finds out in processes of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_checkpoint
from safetensors.torch import load_file, save_file

# Eight processes, two at a time. All tests look at what they found, so one worker runs them.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dry_run")]

ROOT = Path(__file__).parent.parent
SCENARIOS = {
    "qwen3": ("serve", "float32", "auto", "4", "qwen3"),
    "qwen2": ("serve", "float32", "auto", "2", "qwen2"),
    "fp8": ("serve", "float32", "fp8", "2", "scaled"),
    "bfloat16": ("serve", "bfloat16", "auto", "2", "qwen3"),
    "bfloat16 with fp8": ("serve", "bfloat16", "fp8", "2", "scaled"),
    "int8": ("int8", "2", "qwen3"),
    "decode": ("decode", "wide"),
    "faults": ("faults", "qwen3"),
}


def dry_run(*arguments: str) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "tests/dry_run.py", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """The scenarios, two at a time."""
    path = tmp_path_factory.mktemp("dry_run")
    make_checkpoint(path / "qwen3")
    make_checkpoint(path / "qwen2", family="qwen2")
    # A checkpoint with scales of an fp8 KV cache.
    make_checkpoint(path / "scaled")
    file = path / "scaled" / "model.safetensors"
    scales = {f"model.layers.1.self_attn.{kind}_scale": torch.tensor(0.7) for kind in "kv"}
    save_file(load_file(file) | scales, file)
    # As many heads as Qwen3-0.6B, on which the number of splits depends; several chunks of logits.
    make_checkpoint(path / "wide", kv_heads=8, vocab_size=5000)
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(dry_run, *rest, str(path / model))
            for name, (*rest, model) in SCENARIOS.items()
        }


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "fp8", "int8"])
def test_tokens_are_those_of_the_cpu_engine(runs: dict[str, Future], family: str) -> None:
    found = runs[family].result()["found"]
    for run in found:
        assert run["plain is right"], run["options"]
        assert run["ruled is right"], run["options"]
        assert (run["preemptions"] > 0) == (run["options"]["num_kvcache_blocks"] < 99)


def test_the_host_waits_for_tokens_only(runs: dict[str, Future]) -> None:
    """Without rules; with overlap only when no step is left to launch."""
    for run in runs["qwen3"].result()["found"]:
        waits = run["plain waits"]
        assert all(x.startswith("the last event at nanovllm/runner/") for x in waits), waits
        if run["options"]["async_scheduling"]:
            assert sum(waits.values()) < 10, waits


def test_a_steady_decode_waits_for_nothing(runs: dict[str, Future]) -> None:
    assert runs["decode"].result()["found"]["plain"]["waits"] == {}


@pytest.mark.parametrize("rules", ["logprobs", "penalties"])
def test_rules_wait_for_nothing(runs: dict[str, Future], rules: str) -> None:
    found = runs["decode"].result()["found"]
    assert found[rules]["waits"] == {}
    assert found[rules]["launches"] <= found["plain"]["launches"] + 40


def test_launches_of_a_decode(runs: dict[str, Future]) -> None:
    found = runs["decode"].result()["found"]
    print(f"outside the layers: {found['outside the layers']} launches of a step")
    assert found["per layer"] <= 9


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "fp8", "bfloat16", "bfloat16 with fp8", "int8"])
def test_nothing_is_compiled_while_serving(runs: dict[str, Future], name: str) -> None:
    for run in runs[name].result()["found"]:
        serving = run["variants while serving"]
        print(f"{name}: {len(run['variants at start'])} at start, {len(serving)} while serving")
        assert serving == [], run["options"]
        # Launches that skip Triton's specialization get the variant that it would choose.
        assert run["direct launches"] > 1000


@pytest.mark.parametrize("name", SCENARIOS)
def test_ci_compiles_every_variant(runs: dict[str, Future], name: str) -> None:
    assert runs[name].result()["not compiled"] == []


def test_the_model_of_the_device_finds_faults(runs: dict[str, Future]) -> None:
    for expected, found in runs["faults"].result()["found"]:
        assert expected in found
