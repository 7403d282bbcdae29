"""Tensor parallelism: 2 and 4 ranks on a CPU answer as one does, and end together."""

import functools
import os
import pickle
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fresh
import numpy as np
import pytest
import torch
from adapters import lora, save_adapter
from checkpoints import make_checkpoint, model_config
from family_checkpoints import make_family_checkpoint
from moe_checkpoints import make_moe_checkpoint
from quantized_files import quantize_checkpoint
from safetensors.torch import load_file

from nanovllm import LLM
from nanovllm.features.parallel.shards import config_of_rank, tensors_of_rank
from nanovllm.models.backend import Backend
from nanovllm.models.qwen3 import Qwen3

ROOT = Path(__file__).parents[2]
Job = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Job]:
    """Runs a job of ranks.py: (name, number of ranks, **arguments) -> what each rank found."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tests/helpers/ranks.py"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as server:

        @functools.cache
        def ask(*job: Any) -> list[dict[str, Any]]:
            pickle.dump(job, server.stdin)
            server.stdin.flush()
            return pickle.load(server.stdout)

        def run(name: str, size: int, **arguments: Any) -> list[dict[str, Any]]:
            return ask(name, size, *sorted(arguments.items()))

        yield run
        server.stdin.close()


FAMILIES = "qwen3vl", "phi4mini", "smollm3", "ministral3", "granite", "gemma3", "mistral window"


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("ranks")
    make_checkpoint(path / "qwen3")  # 4 query heads, 2 KV heads, 199 tokens
    make_checkpoint(path / "qwen2", family="qwen2", tie=True)
    # As many KV heads as 4 ranks, and biases of all attention layers.
    make_checkpoint(path / "biased", "llama", kv_heads=4, group=1, attention_bias=True)
    for family in FAMILIES:
        make_family_checkpoint(path / family, family)
    make_moe_checkpoint(path / "moe", mlp_only_layers=[1])
    # An expert of each of two ranks has as many units as a block of int8 weights.
    make_moe_checkpoint(path / "moe-128", moe_intermediate_size=128, num_experts=4)
    make_checkpoint(path / "qwen2-new", family="qwen2", tie=True, seed=1)
    make_moe_checkpoint(path / "moe-new", 1, mlp_only_layers=[1])
    return {path.name: str(path) for path in path.iterdir()}


def values(found: list[dict[str, Any]]) -> list[Any]:
    """What the ranks returned. If one failed, this shows what it printed."""
    for result in found:
        assert "value" in result, result["log"][-3000:]
    return [result["value"] for result in found]


# ---- the same answers ----

CASES = [
    ("qwen3", 2, {}),
    ("qwen3", 4, {}),  # each KV head is on two ranks; the last rank has a token less
    ("qwen2", 2, {"enable_prefix_caching": False}),
    ("biased", 4, {"async_scheduling": True, "swap_space": 2**-9}),
    ("moe", 2, {}),  # each expert is divided
    ("phi4mini", 4, {}),  # a tensor of q, k and v is divided, with each KV head on two ranks
    *((family, 2, {}) for family in FAMILIES if family != "phi4mini"),
]


@pytest.mark.parametrize(("model", "backend"), [("qwen2", "numba"), ("moe", "sdpa")])
def test_new_weights_and_sleep(ranks: Job, paths: dict[str, str], model: str, backend: str) -> None:
    """With a tied head, with packed weights, and with experts."""
    arguments = dict(path=paths[model], new=paths[f"{model}-new"], backend=backend)
    [[old, wanted, *_]] = values(ranks("hand_overs", 1, **arguments))
    assert old != wanted
    for found in values(ranks("hand_overs", 2, **arguments)):
        assert found == [old] + [wanted] * 6


@pytest.mark.parametrize(
    ("model", "size", "options"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
    ids=str,
)
def test_ranks_answer_as_one(
    ranks: Job, paths: dict[str, str], model: str, size: int, options: dict[str, Any]
) -> None:
    """Chunked prefill, preemption, forks, beams, log-probabilities, embeddings and streams."""
    arguments = {"path": paths[model], **options}
    [one] = values(ranks("everything", 1, **arguments))
    assert one["stats"]["preemptions"] > 0
    assert ("swap_space" in options) == (one["stats"].get("host_loads", 0) > 0)
    found = ranks("everything", size, **arguments)
    for answer in values(found):
        assert answer["tokens"] == one["tokens"]
        assert (answer["stats"], answer["steps"]) == (one["stats"], one["steps"])
        for name, numbers in one["numbers"].items():
            np.testing.assert_allclose(answer["numbers"][name], numbers, atol=2e-4, err_msg=name)
        assert answer["numbers"] == values(found)[0]["numbers"]  # the same bits on all ranks
    logs = [result["log"] for result in found]
    assert "KV cache of" in logs[0]
    assert "Generating" in logs[0]
    assert logs[1:] == [""] * (size - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "sizes"), [("capture", [8, 4]), ("replay", None)])
def test_ranks_capture_the_same_sizes(
    ranks: Job, paths: dict[str, str], fault: str, sizes: list[int] | None
) -> None:
    """What fails on one rank is not captured on the other, and both say so."""
    [wanted] = values(ranks("greedy", 1, path=paths["qwen3"]))
    found = ranks("with_a_fault", 2, path=paths["qwen3"], fault=fault)
    assert values(found) == [{"tokens": wanted, "sizes": sizes}] * 2
    words = {
        "capture": ("the next size failed on another rank", "RuntimeError('no graph')"),
        "replay": ("because they fail on another rank", "the tokens of a CUDA graph has a"),
    }
    for result, text in zip(found, words[fault], strict=True):
        assert text in result["log"]


@pytest.mark.slow
def test_text_and_stop_strings(ranks: Job) -> None:
    [one] = values(ranks("text", 1))
    assert {reason for _, reason in one} == {"stop"}
    assert one[0][0] == "12 + 30 = 42"
    assert values(ranks("text", 2)) == [one] * 2
    assert values(ranks("text", 2, with_drafts=True)) == [one] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "weights", "backend"), [("qwen2", "int8", "numba"), ("moe-128", "int4", "sdpa")]
)
def test_quantization(
    ranks: Job, paths: dict[str, str], model: str, weights: str, backend: str
) -> None:
    """A rank has scales of its own: the results are not those of one, and as accurate."""
    if backend == "numba":
        pytest.importorskip("numba")
    path, options = paths[model], {"quantization": weights}  # qwen2's embeddings are int8 too
    [exact] = values(ranks("everything", 1, path=path))
    [one] = values(ranks("everything", 1, path=path, **options))
    first, second = values(ranks("everything", 2, path=path, attention_backend=backend, **options))
    assert first == second
    for name in ("prompt_logprobs", "embeddings"):  # the other numbers are too few
        errors = [
            np.abs(np.array(found["numbers"][name]) - exact["numbers"][name]).mean()
            for found in (one, first)
        ]
        print(f"{name}: mean errors {errors} of 1 and 2 ranks")
        assert 0 < errors[1] < 1.3 * errors[0], name


def test_an_adapter(ranks: Job, paths: dict[str, str], tmp_path) -> None:
    tensors = lora(load_file(Path(paths["qwen3"]) / "model.safetensors"), "_proj|lm_head")
    adapter = str(save_adapter(tmp_path, tensors, lora_alpha=8))
    [one] = values(ranks("greedy", 1, path=paths["qwen3"], adapter=adapter))
    assert [one] != values(ranks("greedy", 1, path=paths["qwen3"]))
    assert values(ranks("greedy", 2, path=paths["qwen3"], adapter=adapter)) == [one] * 2


def test_a_deleted_engine_leaves_no_connections(ranks: Job, paths: dict[str, str]) -> None:
    for first, *others in values(ranks("engines_in_turn", 2, path=paths["qwen3"])):
        assert first[1] == 1  # the group of all processes, which the script may use
        assert all(other == first for other in others)


def test_bytes_of_a_step(ranks: Job, paths: dict[str, str]) -> None:
    """A decode of 3 rows in float32: 2 layers, hidden states of 64, 199 tokens on 2 ranks."""
    for found in values(ranks("bytes_of_a_step", 2, path=paths["qwen3"])):
        assert found == {
            "all_reduce": [3 * 64 * 4] * (1 + 2 * 2),
            "all_gather": [3 * 100 * 4],
            "agree": [8],
        }


# ---- what could make ranks disagree ----


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("other_parameters", "different steps: rank 0: .*seed=0.*rank 1: .*seed=1"),
        ("other_options", "different options: rank 0: .*seed=0.*rank 1: .*seed=1"),
        ("an_abort", "different steps: .*one thread, including aborts"),
    ],
)
def test_ranks_that_disagree(ranks: Job, paths: dict[str, str], job: str, words: str) -> None:
    found = values(ranks(job, 2, path=paths["qwen3"]))
    assert found[0] == found[1]
    assert re.match(f"RuntimeError: the ranks have {words}", found[0]), found[0]


def test_other_tokens_on_another_rank(ranks: Job, paths: dict[str, str]) -> None:
    """The engines remain usable, although the last tokens are not those of the other rank."""
    (failed, answer), other = values(ranks("other_tokens", 2, path=paths["qwen3"]))
    assert (failed, answer) == other
    assert re.match("RuntimeError: the ranks have different steps: rank 0: .*after", failed)
    [(_, wanted)] = values(ranks("other_prompts", 1, path=paths["qwen3"]))
    assert answer == wanted


LOST = "RuntimeError: rank 0 is disconnected from the other ranks: a rank failed"


def test_a_rank_that_fails(ranks: Job, paths: dict[str, str]) -> None:
    """The other one does not wait for its end."""
    first, second = values(ranks("a_failing_rank", 2, path=paths["qwen3"]))
    assert first[0].startswith(LOST)
    assert second[0] == "ZeroDivisionError: division by zero"
    assert first[1].startswith(LOST)
    assert second[1].startswith(LOST.replace("rank 0", "rank 1"))


def test_a_killed_rank(ranks: Job, paths: dict[str, str]) -> None:
    first, second = ranks("a_killed_rank", 2, path=paths["qwen3"])
    assert first["value"].startswith(LOST)
    assert second["status"] == 9


def test_ctrl_c_in_one_rank(ranks: Job, paths: dict[str, str]) -> None:
    first, second = ranks("ctrl_c", 2, path=paths["qwen3"])
    assert first["value"].startswith(LOST)
    assert second["value"] == "KeyboardInterrupt: "


def test_a_rank_that_does_nothing(ranks: Job, paths: dict[str, str]) -> None:
    """It fails at once when it takes part again, not after the timeout of its send."""
    first, second = values(ranks("a_slow_rank", 2, path=paths["qwen3"]))
    assert first.startswith(LOST)
    assert second.startswith(LOST.replace("rank 0", "rank 1"))


def test_the_fewest_blocks(ranks: Job, paths: dict[str, str]) -> None:
    [one] = values(ranks("fewest_blocks", 1, path=paths["qwen3"]))
    first, second = values(ranks("fewest_blocks", 2, path=paths["qwen3"]))
    assert first == second == 2 * one + 1 - 10  # the blocks of a rank are half as large


# ---- before anything is loaded ----


def test_not_started_by_torchrun(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/tmp/some_script.py"])
    with pytest.raises(
        ValueError,
        match="needs 2 processes, and WORLD_SIZE is 1; start them with: "
        "torchrun --nproc-per-node 2 some_script.py",
    ):
        LLM(tensor_parallel_size=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="WORLD_SIZE is 4; start them with: torchrun --nproc-per"):
        LLM(tensor_parallel_size=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="device='cuda:1' would be the GPU of all 2 ranks"):
        LLM(tensor_parallel_size=2, device="cuda:1")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        ValueError, match="RANK is not set; start them with: torchrun --nproc-per-node 2 so"
    ):
        LLM(tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("sizes", "size", "words"),
    [
        ((14, 2, 4864), 4, "the 14 query heads .* 4864 .* 2 KV heads .*; use one of 1, 2$"),
        ((6, 3, 64), 2, "divide the 3 KV heads or be a multiple of them; use one of 1$"),
        ((8, 2, 100), 8, "the 100 feed-forward units, .* use one of 1, 2, 4$"),
    ],
)
def test_heads_that_do_not_divide(sizes: tuple[int, int, int], size: int, words: str) -> None:
    heads, kv_heads, inner = sizes
    attention = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128)
    config = model_config("qwen3", **attention, intermediate_size=inner, vocab_size=151_936)
    with pytest.raises(ValueError, match=f"tensor_parallel_size={size} does not .*{words}"):
        config_of_rank(config, size)


# ---- memory and files ----


@pytest.mark.parametrize("size", [2, 4, 8])
def test_slices_make_the_whole(size: int) -> None:
    """Every element of a checkpoint is on one rank, and that of a copied KV head on as many."""
    attention = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=2, attention_bias=True)
    sizes = dict(intermediate_size=16, hidden_size=8, vocab_size=19, num_hidden_layers=2)
    whole = model_config("qwen3", **attention, **sizes)
    backend = Backend(torch.device("cpu"), torch.float32)
    sources = {
        part.name: torch.rand(part.shape) for part in Qwen3(whole, 8, backend).checkpoint_tensors()
    }
    counts: dict[str, torch.Tensor] = {name: torch.zeros(x.shape) for name, x in sources.items()}
    stored = defaultdict(list)
    for rank in range(size):
        model = Qwen3(config_of_rank(whole, size), 8, backend)
        places = {part.name: part.store.__self__ for part in model.checkpoint_tensors()}
        for part in tensors_of_rank(model.checkpoint_tensors(), whole, rank, size):
            assert part.shape == sources[part.name].shape
            part.store(sources[part.name][part.slices])
            counts[part.name][part.slices] += 1
            stored[part.name].append(places[part.name])
    for name, source in sources.items():
        if "norm" in name:
            assert all(torch.equal(x, source) for x in stored[name])
        elif name.endswith("o_proj.bias"):
            assert torch.equal(sum(stored[name]), source)
        else:
            copies = max(1, size // 2) if "k_proj" in name or "v_proj" in name else 1
            assert (counts[name] == copies).all(), name
            by = 1 if "o_proj" in name or "down_proj" in name else 0
            assert torch.equal(torch.cat(stored[name][::copies], dim=by)[: len(source)], source)


@pytest.mark.slow
def test_the_script_of_the_documentation(tmp_path) -> None:
    """Started by torchrun itself, which ends both ranks when one fails."""
    page = (ROOT / "docs" / "tensor_parallel.md").read_text()
    script = tmp_path / "script.py"
    [code] = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("12 + 30 = 42") == 1


@pytest.mark.slow
def test_a_quantized_checkpoint(ranks: Job, tmp_path) -> None:
    """Each rank loads its slices of the decoded weights."""
    make_checkpoint(tmp_path)
    quantize_checkpoint(tmp_path, "gptq desc_act")
    alone, *_ = values(ranks("greedy", 1, path=str(tmp_path)))
    assert values(ranks("greedy", 2, path=str(tmp_path))) == [alone, alone]


ONE_PROCESS = """
import sys
from nanovllm import LLM
LLM(device="cpu", attention_backend="sdpa", num_kv_cache_blocks=4, skip_tokenizer_init=True)
print(*sorted(name for name in sys.modules if name.startswith("nanovllm.features.parallel.")))
"""


def test_one_process_imports_no_ranks() -> None:
    done = fresh.run(ONE_PROCESS)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split()
