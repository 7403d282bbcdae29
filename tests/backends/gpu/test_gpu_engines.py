"""Engines with tiny models on a GPU: graphs, the host cache, memory, experts, quantization."""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import references
import torch
from checkpoints import check_greedy, make_checkpoint
from gpu_cases import DEVICE, MARKS, error
from hybrid_checkpoints import make_hybrid_checkpoint
from moe_checkpoints import make_moe_checkpoint

from nanovllm import LLM, SamplingParams
from nanovllm.features.kv.host_cache import pool as host_pool
from nanovllm.loading import memory
from nanovllm.models.fp8 import FP8
from nanovllm.plan import BlockCopy

pytestmark = MARKS


def make_llm(path: Path, **options: Any) -> LLM:
    settings = dict(dtype="float32", device=DEVICE, skip_tokenizer_init=True, max_num_seqs=16)
    return LLM(str(path), **settings | {"num_kv_cache_blocks": 400} | options)


def answer(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [[*o.outputs[0].token_ids] for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("hybrid", [False, True])
def test_experts_have_the_tokens_of_transformers_captured_and_eager(hybrid: bool, tmp_path) -> None:
    sizes = dict(moe_intermediate_size=64, shared_expert_intermediate_size=64)
    model = make_moe_checkpoint(tmp_path, hybrid=hybrid, **sizes)
    prompts = [[i + 1] * (3 * i + 1) for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for eager in (False, True):
        llm = make_llm(tmp_path, enforce_eager=eager)
        check_greedy(model, llm.generate(prompts, params, use_tqdm=False))


@pytest.mark.parametrize("model", ["qwen3", "hybrid"])
def test_captured_and_eager_steps_are_close_in_bfloat16(model: str, tmp_path) -> None:
    """Log-probabilities of the first tokens: of graphs of chunks, and of the delta rule."""
    make_hybrid_checkpoint(tmp_path) if model == "hybrid" else make_checkpoint(tmp_path)
    prompts = [[i + 1] * (11 * i + 1) for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    found = []
    for eager in (True, False):
        llm = make_llm(tmp_path, dtype="bfloat16", enforce_eager=eager)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        entries = [entry for o in outputs for entry in o.prompt_logprobs[1:]]
        found.append(torch.tensor([x.logprob for entry in entries for x in entry.values()]))
    assert error(found[1], found[0]) < 2e-2


@pytest.mark.parametrize("kind", ["plain", "int4", "hybrid"])
def test_new_weights_and_sleep(tmp_path, kind: str) -> None:
    """Captured steps read new weights where the old ones were, and are captured after sleep."""
    make = make_hybrid_checkpoint if kind == "hybrid" else make_checkpoint
    models = [make(tmp_path / str(seed), seed=seed) for seed in range(2)]
    prompts = [[i + 1] * (3 * i + 1) for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options = dict(max_num_seqs=8, quantization="int4" if kind == "int4" else None)
    eager = [make_llm(tmp_path / str(i), enforce_eager=True, **options) for i in range(2)]
    wanted = [answer(llm, prompts, params) for llm in eager]
    assert wanted[0] != wanted[1]
    llm = make_llm(tmp_path / "0", **options)
    assert answer(llm, prompts, params) == wanted[0]
    graphs = llm.engine.runner.graphs
    for seed in (1, 0):
        llm.load_weights(models[seed].state_dict())
        assert answer(llm, prompts, params) == wanted[seed]
    assert llm.engine.runner.graphs is graphs
    del graphs
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.load_weights(models[1].named_parameters())
        assert llm.engine.runner.graphs is not None
        assert answer(llm, prompts, params) == wanted[level - 1]


def test_what_graphs_read_is_not_freed(path: Path, monkeypatch) -> None:
    """As far as torch sees it: tests/helpers/dry_run.py checks what Triton's kernels read."""
    graph = torch.cuda.graph
    if "check_input_liveness" not in inspect.signature(graph).parameters:
        pytest.skip("this torch does not check it")
    monkeypatch.setattr(torch.cuda, "graph", partial(graph, check_input_liveness=True))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert len(answer(make_llm(path, max_num_seqs=4), [[1, 2, 3]] * 4, params)) == 4


def test_steady_decode_never_waits(path: Path) -> None:
    llm = make_llm(path, dtype="auto", max_num_seqs=8)
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, ignore_eos=True, max_tokens=100)
    for i in range(8):
        llm.engine.add_request([i + 1] * 5, params)
    for _ in range(5):
        llm.engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(60):
            llm.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num", [1, 7, 8, 100, 512])
def test_capture_sizes(path: Path, num: int) -> None:
    """A batch as large as can be, its rows in every combination as they end.

    Matrix products of other sizes round differently.
    """
    prompts = [[i % 190 + 1, 2, 3] for i in range(num)]
    params = [
        SamplingParams(temperature=0, max_tokens=1 + i % 60, ignore_eos=True, logprobs=2)
        for i in range(num)
    ]
    answers = []
    for eager in (True, False):
        llm = make_llm(path, num_kv_cache_blocks=5 * num, max_num_seqs=num, enforce_eager=eager)
        answers.append([o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)])
        del llm
    for wanted, found in zip(*answers, strict=True):
        assert len(found.token_ids) == len(wanted.token_ids)
    assert references.count_near_ties(*answers) <= 1 + num // 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_copies_of_the_host_pool(monkeypatch, dtype: torch.dtype) -> None:
    """Blocks that are saved, overwritten at once, and loaded elsewhere, several times over."""
    monkeypatch.setattr(host_pool, "CHUNK_BYTES", 7 * 3 * 2 * 2 * 16 * 64 * dtype.itemsize)
    cache = torch.randn(3, 2, 40, 2, 16, 64, device=DEVICE).to(dtype)
    pool = host_pool.HostPool(30, cache)
    bits = cache.view(torch.uint8)
    with torch.inference_mode():
        for _ in range(20):
            before, blocks, slots = bits.clone(), torch.randperm(40), torch.randperm(30)[:20]
            pool.save(cache, [BlockCopy(*m) for m in zip(blocks.tolist(), slots.tolist())])  # noqa: B905
            bits.fill_(255)
            moves = zip(slots.tolist(), blocks.tolist()[20:])  # noqa: B905
            pool.load(cache, [BlockCopy(*move) for move in moves])
            assert torch.equal(bits[:, :, blocks[20:]], before[:, :, blocks[:20]])
            assert (bits[:, :, blocks[:20]] == 255).all()
            bits.copy_(before)


@pytest.mark.parametrize("eager", [True, False])
def test_tokens_with_a_host_cache(path: Path, eager: bool) -> None:
    options = dict(max_num_seqs=4, max_model_len=300, enforce_eager=eager)
    prompts = [[(7 * i + j) % 190 + 1 for j in range(40 + 15 * i)] for i in range(10)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    def tokens(**more: object) -> tuple[list[list[int]], dict]:
        llm = make_llm(path, **options, **more)
        return answer(llm, prompts, params) + answer(llm, prompts, params), llm.stats()

    wanted, _ = tokens(num_kv_cache_blocks=400)
    found, stats = tokens(num_kv_cache_blocks=24, swap_space=2**-6)
    assert found == wanted
    assert stats["host_loads"] > 20


def test_graphs_fit_in_the_margin(tmp_path) -> None:
    """What the graphs of 28 layers and 512 rows take outside torch's allocator."""
    make_checkpoint(tmp_path, num_hidden_layers=28)
    taken = []
    for eager in (True, False):  # the first one loads libraries
        llm = make_llm(tmp_path, dtype="auto", max_num_seqs=512, enforce_eager=eager)
        free, total = torch.cuda.mem_get_info(torch.device(DEVICE))
        taken.append(total - free - torch.cuda.memory_reserved())
        del llm
    assert taken[1] - taken[0] < memory.CUDA_MARGIN


def test_too_little_memory_is_a_clear_error() -> None:
    for options in ({}, {"max_model_len": 512}):
        with pytest.raises(ValueError, match="too little memory for the KV cache.*gpu_memory_util"):
            LLM(device=DEVICE, gpu_memory_utilization=1e-5, **options)
    llm = LLM(device=DEVICE, gpu_memory_utilization=0.3, max_num_seqs=2)
    assert llm.generate("3 + 4\n", SamplingParams(max_tokens=2), use_tqdm=False)
