"""The numbers are transformers' numbers: logits to 1e-4 and 64 greedy tokens, in float32."""

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import VOCAB, make_checkpoint, random_llm
from references import count_near_ties

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


class Recorder:
    """Stands around an LLM's model and keeps the logits of every token that it computes."""

    def __init__(self, llm: LLM) -> None:
        self.runner = llm.engine.runner
        self.model = self.runner.fused_model
        self.rows: list[tuple[int, torch.Tensor]] = []  # (position, logits [V]), as computed
        self.inner = self.model.forward
        self.model.forward = self.forward  # type: ignore[method-assign]
        self.runner.fused_step = lambda plan: None  # its logits cannot be seen

    def forward(self, batch, attention):
        hidden = self.inner(batch, attention)
        logits = self.model.logits(hidden)
        self.rows += zip(batch.positions.tolist(), logits, strict=True)
        return hidden


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()


@functools.cache
@torch.no_grad()
def reference(model: torch.nn.Module, ids: tuple[int, ...]) -> torch.Tensor:
    """transformers' logits [T, V] of T tokens."""
    return model(torch.tensor([ids])).logits[0]


def check_greedy(
    model: torch.nn.Module, ids: list[int], tokens: list[int], number: int = 64
) -> torch.Tensor:
    """The tokens are the greedy ones of transformers, whose logits [T, V] are returned.

    Each has the largest logit after those before it: one pass shows what so many steps would.
    """
    assert len(tokens) == number
    logits = reference(model, (*ids, *tokens))
    assert tokens == logits[len(ids) - 1 : -1].argmax(dim=1).tolist()
    return logits


def check(llm: LLM, model: torch.nn.Module, ids: list[int], computed_from: int = 0) -> None:
    """One prompt alone: same tokens, same logits at each position from `computed_from` on."""
    recorder = Recorder(llm)
    try:
        got = llm.generate(ids, GREEDY, use_tqdm=False)[0]["token_ids"]
    finally:
        llm.engine.runner.fused_model.forward = recorder.inner
    logits = check_greedy(model, ids, got)
    positions = {position for position, _ in recorder.rows}
    assert set(range(computed_from, len(ids) + 63)) <= positions
    for position, row in recorder.rows:
        if position < len(ids) + 63:  # one step late may compute one more
            torch.testing.assert_close(row, logits[position], atol=1e-4, rtol=0)


SHAPES = [
    # family, head_dim, kv_heads, group, tied, block_size
    ("qwen3", 32, 2, 2, False, 16),
    ("qwen3", 64, 1, 8, True, 1),
    ("qwen3", 128, 2, 1, False, 256),
    ("qwen3", 64, 2, 4, True, 16),
    ("qwen2", 32, 2, 2, True, 1),
    ("qwen2", 64, 1, 4, False, 16),
    ("qwen2", 128, 1, 1, False, 16),
    ("qwen2", 32, 1, 8, True, 256),
    ("llama", 64, 1, 3, True, 16),
    ("llama", 32, 2, 2, False, 1),
    ("mistral", 32, 2, 2, False, 16),
]


@pytest.mark.parametrize(("family", "head_dim", "kv_heads", "group", "tie", "block"), SHAPES)
def test_shapes(
    tmp_path, family: str, head_dim: int, kv_heads: int, group: int, tie: bool, block: int
) -> None:
    model = make_checkpoint(tmp_path, family, head_dim, kv_heads, group, tie)
    llm = random_llm(tmp_path, block_size=block, num_kv_cache_blocks=4096 // block)
    check(llm, model, prompt(37))
    check(llm, model, prompt(1, seed=1))


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def small(request, tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp(request.param)
    return path, make_checkpoint(path, request.param)


@pytest.mark.slow
def test_every_chunk_boundary(small) -> None:
    """The prompt's first chunk has each length from 1 to 36, the rest follows in one."""
    path, model = small
    ids = prompt(37)
    llm = random_llm(path, enable_prefix_caching=False)
    for first in range(1, 37):
        llm.engine.scheduler.token_budget = first
        llm.engine.add_request(ids, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        recorder = Recorder(llm)
        assert llm.engine.step() == []
        llm.engine.scheduler.token_budget = 64
        outs = []
        while llm.engine.has_unfinished_requests():
            outs += llm.engine.step()
        llm.engine.runner.fused_model.forward = recorder.inner
        logits = check_greedy(model, ids, outs[0]["token_ids"], 4)
        for position, row in recorder.rows[: len(ids) + 3]:
            torch.testing.assert_close(row, logits[position], atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 4, 16])
def test_prefix_hits(small, block: int) -> None:
    """A prompt that shares 0, 1, ... blocks with an earlier one, and one that is wholly cached."""
    path, model = small
    llm = random_llm(path, block_size=block, num_kv_cache_blocks=1024 // block)
    first, few = prompt(48), GREEDY.clone()
    few.max_tokens = 16  # what was read wrongly shows in the first of them
    check(llm, model, first)
    for shared in (0, 1, 15, 16, 17, 31, 32, 47):
        ids = first[:shared] + prompt(20, seed=shared + 1)
        out = llm.generate(ids, few, use_tqdm=False)[0]
        check_greedy(model, ids, out["token_ids"], 16)
        assert out.num_cached_tokens >= shared // block * block
    out = llm.generate(first, GREEDY, use_tqdm=False)[0]
    assert out.num_cached_tokens == (48 - 1) // block * block
    check_greedy(model, first, out["token_ids"])
    answer = first + out["token_ids"]
    check(llm, model, answer, computed_from=(len(answer) - 1) // block * block)


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 7}, {"max_num_seqs": 3}])
@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
def test_mixed_lengths(small, options: dict, asynchronous: bool) -> None:
    path, model = small
    llm = random_llm(path, async_scheduling=asynchronous, **options)
    prompts = [prompt(n, seed=n) for n in (1, 2, 15, 16, 17, 33, 40, 40)]
    outs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for ids, out in zip(prompts, outs, strict=True):
        check_greedy(model, ids, out["token_ids"])


def test_preemption(small) -> None:
    """In a small pool sequences are preempted and resumed, and the answers are the same."""
    path, model = small
    llm = random_llm(path, block_size=4, num_kv_cache_blocks=40)
    prompts = [prompt(n, seed=n) for n in (20, 30, 40, 50)]
    outs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert llm.engine.scheduler.preemptions > 0
    for ids, out in zip(prompts, outs, strict=True):
        check_greedy(model, ids, out["token_ids"])


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_biases_of_attention(tmp_path, family: str) -> None:
    """attention_bias: in Qwen3 and Llama it is a bias of all four projections."""
    model = make_checkpoint(tmp_path, family, attention_bias=True)
    assert model.model.layers[0].self_attn.o_proj.bias is not None
    check(random_llm(tmp_path), model, prompt(20))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ROPES = [
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
]


@pytest.mark.slow
@pytest.mark.parametrize("rope", ROPES)
def test_rope_forms(tmp_path, rope: dict) -> None:
    """Both forms of config.json: rope_parameters, and rope_theta with rope_scaling."""
    import json

    model = make_checkpoint(tmp_path, **rope)
    check(random_llm(tmp_path), model, prompt(40))
    config = json.loads((tmp_path / "config.json").read_text())
    params = config.pop("rope_parameters")
    config["rope_theta"] = params.pop("rope_theta")
    params["type"] = params.pop("rope_type")
    config["rope_scaling"] = params if params["type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(random_llm(tmp_path), model, prompt(40))


def test_only_near_ties_may_differ() -> None:
    """The rule by which answers of a GPU are compared with those of a CPU."""

    def output(token_ids: list[int], *gaps: float) -> SimpleNamespace:
        logprobs = [
            {token: SimpleNamespace(logprob=-1.0), token + 1: SimpleNamespace(logprob=-1.0 - gap)}
            for token, gap in zip(token_ids, gaps, strict=False)
        ]
        return SimpleNamespace(token_ids=token_ids, logprobs=logprobs)

    wanted = [output([3, 5, 7], 1.0, 1e-5, 1.0)]
    assert count_near_ties(wanted, [output([3, 5, 7])]) == 0
    assert count_near_ties(wanted, [output([3, 6, 9, 9])]) == 1
    for other in ([4, 5, 7], [3, 5, 8], [3, 8, 7], [3, 5]):
        with pytest.raises(AssertionError):
            count_near_ties(wanted, [output(other)])
