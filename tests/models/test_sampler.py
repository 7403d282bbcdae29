"""The sampler: filters against transformers' own, draws against the exact distribution.

The tests with the fixture `backend` hold for every backend, Triton's in the interpreter.
"""

import functools
import itertools
import math
import os
from types import ModuleType
from typing import Any

import pytest
import torch
from checkpoints import random_llm
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nanovllm import SamplingParams
from nanovllm.models.batch import SamplingBatch
from nanovllm.models.sampler import draw, keep_min_p, keep_top_k, keep_top_p, uniform
from nanovllm.plan import FILTERS


def sampling_batch(
    rows: list[tuple[float, int, float, float]], positions: list[int]
) -> SamplingBatch:
    temperature, *values = map(torch.tensor, zip(*rows, strict=True))
    filters = {
        name: x.long() if name == "top_k" else x.float()
        for (name, off), x in zip(FILTERS.items(), values, strict=True)
        if (x != off).any()
    }
    return SamplingBatch(
        temperature=temperature.float(),
        seeds=torch.arange(len(rows)) + 17,
        positions=torch.tensor(positions),
        filters=filters,
        all_greedy=not temperature.any(),
    )


@pytest.fixture(
    params=[
        "nanovllm.models.sampler",
        "nanovllm.backends.cpu.kernels.sampler",
        "nanovllm.backends.gpu.kernels.sampler",
    ]
)
def backend(request) -> ModuleType:
    if "gpu" in request.param and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    return pytest.importorskip(request.param)


DTYPES = [torch.float32, torch.bfloat16]
NEARLY_1 = 1 - 2.0**-24  # the largest float32 below 1


def exact_weights(
    logits: torch.Tensor, temperature: float, k: int, p: float, m: float
) -> torch.Tensor:
    """The weights of a row's tokens in float64, 0 for those that a filter removes."""
    x = logits.double()
    powers = (x - x.max()) / max(temperature, 1e-38)
    weights = powers.exp()
    if k:
        weights[x < x.topk(min(k, len(x))).values[-1]] = 0
    if p < 1:
        ordered = weights.sort(descending=True).values
        before = (ordered.cumsum(0) - ordered) / ordered.sum()
        weights[weights < ordered[int((before < p).sum()) - 1]] = 0
    weights[powers < (math.log(m) if m else -math.inf)] = 0
    return weights


@functools.cache
def ends_of_ranges(vocab: int) -> tuple[list, torch.Tensor, torch.Tensor]:
    """Rows of all extreme temperatures and filters, logits [R, V] and exact weights [R, V].

    Many logits are equal or hidden; those that differ do so by far more than rounding, and bfloat16
    has all of them.
    """
    rows = list(
        itertools.product(
            (1e-45, 1.0, 1e4),
            (0, 1, 5, vocab - 1, vocab, vocab + 1),
            (1e-45, 0.6, NEARLY_1, 1.0),
            (0.0, 1e-45, 0.3, NEARLY_1, 1.0),
        )
    )
    torch.manual_seed(0)
    logits = torch.randint(-6, 7, (len(rows), vocab)) / 2
    logits[torch.rand(logits.shape) < 0.3] = -torch.inf
    logits[:, -1] = torch.where(logits[:, -1] > -torch.inf, logits[:, -1], 0.0)
    weights = [exact_weights(x, *row) for x, row in zip(logits, rows, strict=True)]
    return rows, logits, torch.stack(weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 40, 5000])
def test_filters_at_the_ends_of_their_ranges(
    backend: ModuleType, vocab: int, dtype: torch.dtype
) -> None:
    """Alone and together: the token is kept, and it is the one at the random number."""
    rows, logits, weights = ends_of_ranges(vocab)
    if "gpu" in backend.__name__:
        if vocab > 1000:
            pytest.skip("the interpreter takes minutes")
        # Both dtypes in turn, which differ in how logits are loaded. The first has min_p=1 alone.
        step = 19 if vocab > 1 else 38
        chosen = slice(4 + step * DTYPES.index(dtype), None, 2 * step)
        rows, logits, weights = rows[chosen], logits[chosen].contiguous(), weights[chosen]
    batch = sampling_batch(rows, list(range(len(rows))))
    tokens = backend.sample(logits.to(dtype), batch).long()
    u = uniform(batch.seeds, batch.positions)
    at = tokens.clamp(min=0)[:, None]
    weight, cumulative = weights.gather(1, at)[:, 0], weights.cumsum(1).gather(1, at)[:, 0]
    total = weights.sum(1)
    kept = (tokens >= 0) & (weight > 0)
    drawn = (cumulative - weight < (u + 1e-5) * total) & (cumulative > (u - 1e-5) * total)
    wrong = [
        (*row, int(token))
        for row, token, right in zip(rows, tokens, kept & drawn, strict=True)
        if not right
    ]
    assert not wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_without_a_token(backend: ModuleType, dtype: torch.dtype) -> None:
    """-1 for NaN of either sign or +inf anywhere in a row, and if every token is hidden."""
    settings = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 5, 0.9, 0.1)]
    wrong = [*itertools.product((math.nan, -math.nan, math.inf), (0, 1500, -1)), (-math.inf, ...)]
    logits = torch.randn(len(wrong) + 2, 3, 3000).to(dtype)
    for row, (value, where) in zip(logits, wrong, strict=False):
        row[:, where] = value
    logits[-1], logits[-1, :, 7] = -torch.inf, -1000.0  # a hidden token is never drawn
    settings, rows = settings * len(logits), list(range(3 * len(logits)))
    if "gpu" in backend.__name__:
        # The interpreter takes seconds: each wrong row with one of the settings, in turn, so that
        # each value and each place is met by all of them.
        rows = [3 * i + (i + i // 3) % 3 for i in range(len(wrong))] + rows[-6:]
    batch = sampling_batch([settings[row] for row in rows], [4] * len(rows))
    tokens = backend.sample(logits.view(-1, 3000)[rows], batch)
    assert (tokens[:-6] == -1).all()
    assert (tokens[-6:-3] >= 0).all()
    assert tokens[-3:].tolist() == [7, 7, 7]


CASES = [
    *((TopKLogitsWarper, keep_top_k, 0, k) for k in (1, 5, 50, 500)),
    *((TopPLogitsWarper, keep_top_p, 1.0, p) for p in (0.01, 0.5, 0.9, 0.999)),
    *((MinPLogitsWarper, keep_min_p, 0.0, p) for p in (0.001, 0.1, 0.5, 1.0)),
]


@pytest.mark.parametrize(("theirs", "ours", "off", "value"), CASES)
def test_filters_are_those_of_transformers(
    theirs: Any, ours: Any, off: float, value: float
) -> None:
    logits = 3 * torch.randn(4, 50)
    wanted = theirs(value)(None, logits.clone())
    wanted[1] = logits[1]  # keeps all
    assert torch.equal(ours(logits, torch.tensor([value, off, value, value])), wanted)


def test_uniform_is_uniform_and_pure() -> None:
    seeds, positions = torch.arange(400).repeat_interleave(500), torch.arange(500).repeat(400)
    u = uniform(seeds, positions)
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u.float(), 100, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 150  # chi-square, 99 degrees: p = 0.0007
    grid = u.view(400, 500)
    assert (
        abs(torch.corrcoef(torch.stack((grid[:, :-1].flatten(), grid[:, 1:].flatten())))[0, 1])
        < 0.01
    )
    assert abs(torch.corrcoef(torch.stack((grid[:-1].flatten(), grid[1:].flatten())))[0, 1]) < 0.01
    assert torch.equal(uniform(seeds[7:9], positions[7:9]), u[7:9])
    assert uniform(torch.tensor([-(2**63), 2**63 - 1]), torch.tensor([0, 1])).min() >= 0


def test_engine_seed_repeats_a_run(path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    runs = [
        [
            o["token_ids"]
            for o in random_llm(path, seed=s).generate([[5, 6]] * 4, params, use_tqdm=False)
        ]
        for s in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("vocab", [7, 256, 300, 512, 5000])
def test_draw_inverts_the_distribution(vocab: int) -> None:
    """Against the cumulative sum in double precision, and never a hidden token, at either end."""
    logits = torch.randn(200, vocab) * 3
    logits[:, ::2] = float("-inf")
    u = torch.rand(200, dtype=torch.float64)
    u[0], u[1] = 0.0, 1.0 - 2.0**-53
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    tokens = draw(logits, u)
    at = cumulative.gather(1, tokens[:, None]).flatten()
    width = logits.double().softmax(dim=-1).gather(1, tokens[:, None]).flatten()
    assert (logits.gather(1, tokens[:, None]) > float("-inf")).all()
    assert (at - width - 1e-6 <= u).all()
    assert (u <= at + 1e-6).all()


def test_draw_with_a_sum_in_the_order_of_a_tree(monkeypatch) -> None:
    """On a GPU a cumulative sum may change in the last place at a probability of 0."""

    def scan(x: torch.Tensor, dim: int) -> torch.Tensor:
        for step in (1 << i for i in range(9)):
            x = torch.cat((x[:, :step], x[:, step:] + x[:, :-step]), dim)
        return x

    torch.manual_seed(0)
    logits = torch.randn(1, 512).masked_fill(torch.rand(1, 512) < 0.7, float("-inf"))
    cumulative = scan(logits.softmax(-1, dtype=torch.float64), -1)
    u = (cumulative / cumulative[:, -1:])[0].clamp(0, 1 - 2.0**-53)
    monkeypatch.setattr(torch.Tensor, "cumsum", scan)
    tokens = draw(logits.expand(512, -1), u)
    assert (logits[0, tokens] > float("-inf")).all()
