"""Checks `keep_typical_p`: python -m lessons build filter --check FILE"""

from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from build_check import case, expect, load, same
from torch import Tensor
from transformers import TypicalLogitsWarper

from nanovllm import LLM, SamplingParams
from nanovllm.models.sampler import FILTER_FUNCTIONS
from nanovllm.plan import FILTERS

keep_typical_p = load("filter.py", "keep_typical_p")
MASKED = float("-inf")


def filtered(logits: Tensor, *typical_p: float) -> Tensor:
    """The solution's result, for one p a row."""
    given = logits.clone()
    with case(f"typical_p={sorted(set(typical_p))} and logits of shape {list(logits.shape)}"):
        got = keep_typical_p(given, torch.tensor(typical_p))
    found = (list(got.shape), got.dtype) if isinstance(got, Tensor) else got
    same(found, (list(logits.shape), logits.dtype), "The shape and dtype of the result")
    unchanged = torch.equal(given.nan_to_num(), logits.nan_to_num())
    expect(unchanged, "The tensor of logits that your function gets must not change.")
    return got


def reference(logits: Tensor, p: float) -> Tensor:
    return TypicalLogitsWarper(p)(None, logits.clone())


def kept(logits: Tensor) -> list[int]:
    return (logits > MASKED).nonzero().flatten().tolist()


def random(seed: int, rows: int, size: int = 60, scale: float = 3) -> Tensor:
    return scale * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("probs", "p", "want"),
    [
        ([0.5, 0.2, 0.2, 0.1], 0.3, [1, 2]),
        ([0.5, 0.2, 0.2, 0.1], 0.6, [0, 1, 2]),
        ([0.5, 0.2, 0.2, 0.1], 0.95, [0, 1, 2, 3]),
        ([0.5, 0.2, 0.2, 0.1], 0.1, [1, 2]),  # the first 0.2 reaches p, the other is equal
        ([0.40002, 0.39998, 0.2], 0.3, [1]),  # almost the same distance
        ([0.25, 0.25, 0.25, 0.125, 0.125], 0.75, [0, 1, 2]),  # a sum of exactly p is enough
    ],
)
def test_small_distributions(probs: list[float], p: float, want: list[int]) -> None:
    logits = torch.tensor([probs]).log()
    for computed in (logits.softmax(-1), logits.log_softmax(-1).exp()):
        if p == 0.75 and not torch.equal(computed, torch.tensor([probs])):
            pytest.skip("this processor's exp rounds 0.25 or 0.125")
    what = f"Of the probabilities {probs} the tokens that typical_p={p} keeps"
    same(kept(filtered(logits, p)[0]), want, what)


@pytest.mark.parametrize("p", [0.001, 0.01, 0.2, 0.5, 0.9, 0.995, 0.9999])
@pytest.mark.parametrize("scale", [1, 3])
def test_equals_transformers(p: float, scale: float) -> None:
    logits = random(0, 8, scale=scale)
    got, want = filtered(logits, *[p] * 8), reference(logits, p)
    for mine, theirs in zip(got, want, strict=True):
        what = f"Of random logits the tokens that typical_p={p} keeps, as in transformers,"
        same(kept(mine), kept(theirs), what)
    difference = (got - want)[want > MASKED].abs().max()
    expect(difference == 0, f"Kept logits should not change, but change by up to {difference:.2f}.")


def test_small_probabilities_count() -> None:
    """A constant that is added to them, so that log 0 is finite, must be much smaller."""
    logits = random(6, 1, 50_000, scale=1)
    got, want = (len(kept(x[0])) for x in (filtered(logits, 0.5), reference(logits, 0.5)))
    expect(
        abs(got - want) < 0.01 * want,
        f"Of 50,000 random logits typical_p=0.5 should keep about {want} tokens, but keeps {got}.",
    )


def test_the_sum_is_rounded() -> None:
    p = 1 - 2**-24  # each of the 1,042 probabilities is larger than what it leaves
    for row in filtered(random(7, 12, 1042, scale=1), *[p] * 12):
        what = f"Even if rounding keeps the sum below p={p:.8f}, the number of tokens that are kept"
        same(len(kept(row)), 1042, what)


def test_one_turns_it_off() -> None:
    logits = random(2, 4, scale=30)  # many probabilities are so small that they are rounded to 0
    logits[:, 50:] = MASKED  # by an earlier filter
    got = filtered(logits, 1.0, 1.0, 1.0, 0.5)
    expect(
        torch.equal(got[:3], logits[:3]), "typical_p=1 should not change the logits, but it does."
    )


def test_each_row_has_its_own_value() -> None:
    values, logits = (0.2, 1.0, 0.9, 0.5), random(1, 4)
    got = filtered(logits, *values)
    for i, p in enumerate(values):
        want = logits[i] if p == 1 else reference(logits[i : i + 1], p)[0]
        what = f"Rows have typical_p={values}. The tokens that row {i} keeps, as it does alone,"
        same(kept(got[i]), kept(want), what)


@pytest.mark.parametrize("p", [0, 1e-6])
@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0])
def test_a_token_is_left(scale: float, p: float) -> None:
    for row in filtered(random(3, 4, scale=scale), *[p] * 4):
        what = f"typical_p={p} should keep at least one token of logits of scale {scale}, but"
        expect(len(kept(row)) > 0, f"{what} keeps none.")


def test_what_is_hidden_stays_hidden() -> None:
    logits, values = random(4, 4), (0.2, 0.5, 0.9, 0.99)
    few = logits[:, :20].clone()
    logits[:, 20:] = MASKED
    for got, want in zip(filtered(logits, *values), filtered(few, *values), strict=True):
        what = "An earlier filter has hidden tokens 20 to 59. What is kept then, as if there were "
        same(kept(got), kept(want), f"{what}no hidden ones,")
    only = torch.full((1, 60), MASKED)
    only[0, 7] = 0.0
    same(kept(filtered(only, 0.5)[0]), [7], "What is kept of the only token, 7,")


@dataclass
class Params(SamplingParams):
    """SamplingParams with the new field."""

    typical_p: Annotated[float, 0, 1] = 1.0


def test_generates_with_the_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The field in its three places, compared with transformers' filter as a logits processor."""
    monkeypatch.setitem(FILTERS, "typical_p", 1.0)
    monkeypatch.setitem(FILTER_FUNCTIONS, "typical_p", keep_typical_p)
    llm = LLM(dtype="float32", device="cpu", attention_backend="sdpa", num_kv_cache_blocks=64)

    def tokens(params: list[Params]) -> list[list[int]]:
        outputs = llm.generate(["A garden\n"] * len(params), params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    common = dict(max_tokens=8, ignore_eos=True)
    values = [0.2, 0.6, 0.9, 1.0] * 6
    processors = [
        [] if p == 1 else [lambda _, logits, p=p: reference(logits[None], p)[0]] for p in values
    ]
    got = tokens([Params(seed=i, typical_p=p, **common) for i, p in enumerate(values)])
    off = tokens([Params(seed=i, **common) for i in range(len(values))])
    want = tokens([Params(seed=i, logits_processors=f, **common) for i, f in enumerate(processors)])
    for i, p in enumerate(values):
        same(got[i], want[i], f"The tokens of the engine with typical_p={p} and seed {i}")
    assert got != off  # else the prompt would prove nothing
