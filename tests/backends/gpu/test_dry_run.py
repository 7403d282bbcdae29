"""The CUDA path without a GPU: what dry_run.py finds out in processes of its own."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from fresh import dry_run
from hybrid_checkpoints import make_hybrid_checkpoint
from moe_checkpoints import make_moe_checkpoint
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow

# The scenarios of dry_run.py, in two processes that take about as long.
PROCESSES = (
    ("qwen3", "int8", "host cache", "faults", "ranks", "memory", "int8 experts"),
    ("qwen2", "fp8", "bfloat16", "bfloat16 with fp8", "int4", "hybrid", "decode", "hybrid experts"),
)
EXPERTS = ["hybrid experts", "int8 experts"]
# Of 32, as in all models.
MULTIPLES = dict(moe_intermediate_size=64, shared_expert_intermediate_size=64)
SCENARIOS = [name for names in PROCESSES for name in names]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each scenario found."""
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
    make_hybrid_checkpoint(path / "hybrid")
    make_moe_checkpoint(path / "experts", num_hidden_layers=2, moe_intermediate_size=64)
    make_moe_checkpoint(path / "hybrid experts", hybrid=True, layer_types="LF", **MULTIPLES)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(partial(dry_run, path), PROCESSES)
    return first | second


@pytest.mark.parametrize(
    "family",
    ["qwen3", "qwen2", "fp8", "int8", "int4", "ranks", "hybrid", "host cache", *EXPERTS],
)
def test_tokens_are_those_of_the_cpu_engine(runs: dict[str, Any], family: str) -> None:
    found = runs[family]["found"]
    for run in found:
        assert run["plain is right"], run["options"]
        assert run["ruled is right"], run["options"]
        assert (run["preemptions"] > 0) == (run["options"]["num_kv_cache_blocks"] < 99)


@pytest.mark.parametrize("name", ["qwen3", "ranks", "hybrid", "host cache", *EXPERTS])
def test_the_host_waits_for_tokens_only(runs: dict[str, Any], name: str) -> None:
    """Without rules; with overlap only when no step is left to launch."""
    for run in runs[name]["found"]:
        small = run["options"]["num_kv_cache_blocks"] < 99
        assert (run["loads"] > 0) == (name == "host cache" and small)
        waits = run["plain waits"]
        assert all(x.startswith("the last event at nanovllm/runner/") for x in waits), waits
        if run["options"]["async_scheduling"]:
            assert sum(waits.values()) < 10, waits


def test_a_steady_decode_waits_for_nothing(runs: dict[str, Any]) -> None:
    assert runs["decode"]["found"]["plain"]["waits"] == {}


@pytest.mark.parametrize("rules", ["logprobs", "penalties"])
def test_rules_wait_for_nothing(runs: dict[str, Any], rules: str) -> None:
    found = runs["decode"]["found"]
    assert found[rules]["waits"] == {}
    assert found[rules]["launches"] <= found["plain"]["launches"] + 40


def test_launches_of_a_decode(runs: dict[str, Any]) -> None:
    found = runs["decode"]["found"]
    assert found["per layer"] <= 9
    assert found["outside the layers"] <= 10


def test_what_a_step_with_chunks_sends(runs: dict[str, Any]) -> None:
    """One copy for what changes in each step, one for the rest, the tiles and the rows on the device."""
    found = runs["decode"]["found"]["with a chunk"]
    print(found)
    assert found["copies"] <= 6


def test_what_the_host_does_for_a_layer_of_a_step_with_chunks(runs: dict[str, Any]) -> None:
    """It replays a graph, and launches attention for chunks and for decodes."""
    found = runs["decode"]["found"]
    assert found["with a chunk"]["calls_of_a_layer"] <= 6
    assert found["with a chunk, eager"]["calls_of_a_layer"] <= 18


def test_the_profile_reserves_what_later_steps_need(runs: dict[str, Any]) -> None:
    reserved, nothing = runs["memory"]["found"]
    for what, most in reserved["most"].items():
        assert most <= reserved["memory"], what
    assert max(reserved["read"]) == 512  # tokens, as many as a request can have
    assert max(nothing["most"].values()) > nothing["memory"]


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "qwen2", "fp8", "bfloat16", "bfloat16 with fp8", "int8", "int4", "ranks"),
        *("hybrid", *EXPERTS),
    ],
)
def test_nothing_is_compiled_while_serving(runs: dict[str, Any], name: str) -> None:
    for run in runs[name]["found"]:
        serving = run["variants while serving"]
        print(f"{name}: {len(run['variants at start'])} at start, {len(serving)} while serving")
        assert serving == [], run["options"]
        # Launches that skip Triton's specialization get the variant that it would choose.
        assert run["direct launches"] > 1000


@pytest.mark.parametrize("name", SCENARIOS)
def test_ci_compiles_every_variant(runs: dict[str, Any], name: str) -> None:
    assert runs[name]["not compiled"] == []


def test_the_model_of_the_device_finds_faults(runs: dict[str, Any]) -> None:
    for expected, found in runs["faults"]["found"]:
        assert expected in found
