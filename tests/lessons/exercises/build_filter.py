"""Checks `keep_typical_p`: python -m lessons build filter --check FILE"""

from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from build_check import expect, load
from torch import Tensor
from transformers import TypicalLogitsWarper

from nanovllm import LLM, SamplingParams
from nanovllm.models.sampler import FILTER_FUNCTIONS
from nanovllm.plan import FILTERS

keep_typical_p = load("filter.py", "keep_typical_p")
MASKED = float("-inf")


def filtered(logits: Tensor, *typical_p: float) -> Tensor:
    """The solution's result, for one p a row."""
    got = keep_typical_p(logits.clone(), torch.tensor(typical_p))
    is_right = isinstance(got, Tensor) and got.shape == logits.shape and got.dtype == logits.dtype
    expect(is_right, f"A tensor of shape {list(logits.shape)} is expected, but {got!r} came out.")
    return got


def reference(logits: Tensor, p: float) -> Tensor:
    return TypicalLogitsWarper(p)(None, logits.clone())


def kept(logits: Tensor) -> list[int]:
    return (logits > MASKED).nonzero().flatten().tolist()


@pytest.mark.parametrize(("p", "want"), [(0.3, [1, 2]), (0.6, [0, 1, 2]), (0.95, [0, 1, 2, 3])])
def test_the_example(p: float, want: list[int]) -> None:
    got = kept(filtered(torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log(), p)[0])
    expect(
        got == want,
        f"Of the probabilities 0.5, 0.2, 0.2, 0.1 typical_p={p} should keep the tokens {want}, but "
        f"it keeps {got}.",
    )


def test_equal_distances_are_kept_together() -> None:
    got = kept(filtered(torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log(), 0.1)[0])
    expect(
        got == [1, 2],
        "Of the probabilities 0.5, 0.2, 0.2, 0.1 the first 0.2 reaches typical_p=0.1 alone, and "
        f"the other 0.2 has the same distance. The tokens [1, 2] should be kept, but {got} are.",
    )


def test_a_sum_of_exactly_p_is_enough() -> None:
    """0.25 three times and 0.125 twice, whose sums are exact in float32."""
    logits = torch.tensor([[0.25, 0.25, 0.25, 0.125, 0.125]]).log()
    exact = torch.tensor([[0.25, 0.25, 0.25, 0.125, 0.125]])
    for probs in (logits.softmax(-1), logits.log_softmax(-1).exp()):
        if not torch.equal(probs, exact):
            pytest.skip("this processor's exp rounds 0.25 or 0.125")
    got = kept(filtered(logits, 0.75)[0])
    expect(
        got == [0, 1, 2],
        "Of the probabilities 0.25, 0.25, 0.25, 0.125, 0.125 the first three sum to 0.75, and "
        f"typical_p=0.75 should keep the tokens [0, 1, 2], but it keeps {got}.",
    )


@pytest.mark.parametrize("p", [0.001, 0.2, 0.5, 0.9, 0.98])
def test_equals_transformers(p: float) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(8, 60)
    got, want = filtered(logits, *[p] * 8), reference(logits, p)
    for i in range(8):
        expect(
            kept(got[i]) == kept(want[i]),
            f"For random logits and typical_p={p}, transformers' TypicalLogitsWarper keeps the "
            f"tokens {kept(want[i])}, but yours keeps {kept(got[i])}.",
        )
    difference = (got - want)[want > MASKED].abs().max()
    expect(difference == 0, f"Kept logits should not change, but change by up to {difference:.2f}.")


def test_small_probabilities_count() -> None:
    """A constant that is added to them, so that log 0 is finite, must be much smaller."""
    torch.manual_seed(6)
    logits = torch.randn(1, 50_000)
    got, want = (len(kept(x[0])) for x in (filtered(logits, 0.5), reference(logits, 0.5)))
    expect(
        abs(got - want) < 0.01 * want,
        f"Of 50,000 random logits typical_p=0.5 should keep about {want} tokens, but keeps {got}.",
    )


def test_each_row_has_its_own_value() -> None:
    torch.manual_seed(1)
    values = (0.2, 1.0, 0.9, 0.5)
    logits = 3 * torch.randn(len(values), 60)
    got = filtered(logits, *values)
    for i, p in enumerate(values):
        want = logits[i] if p == 1 else reference(logits[i : i + 1], p)[0]
        expect(
            torch.equal(got[i], want),
            f"Rows have typical_p={values}. Row {i} should keep {len(kept(want))} tokens, as it "
            f"does alone, but keeps {len(kept(got[i]))}.",
        )


def test_one_turns_it_off() -> None:
    torch.manual_seed(2)
    logits = 30 * torch.randn(4, 60)  # many probabilities are so small that they are rounded to 0
    got = filtered(logits, 1.0, 1.0, 1.0, 0.5)
    expect(
        torch.equal(got[:3], logits[:3]), "typical_p=1 should not change the logits, but it does."
    )


@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0])
def test_a_token_is_left(scale: float) -> None:
    torch.manual_seed(3)
    got = filtered(scale * torch.randn(4, 60), *[1e-6] * 4)
    for row in got:
        expect(
            len(kept(row)) > 0,
            f"typical_p=1e-6 should keep at least one token of logits of scale {scale}, but keeps "
            "none.",
        )


def test_what_is_hidden_stays_hidden() -> None:
    torch.manual_seed(4)
    logits = 3 * torch.randn(4, 60)
    few = logits[:, :20].clone()
    logits[:, 20:] = MASKED
    got, want = filtered(logits, 0.2, 0.5, 0.9, 0.99), filtered(few, 0.2, 0.5, 0.9, 0.99)
    for i in range(4):
        expect(
            not kept(got[i, 20:]),
            "Tokens 20 to 59 are -inf already. They should stay -inf, but some do not.",
        )
        expect(
            torch.equal(got[i, :20], want[i]),
            f"An earlier filter has hidden tokens 20 to 59. Of the others, {kept(want[i])} should "
            f"be kept, as if there were no hidden ones, but {kept(got[i])} are.",
        )
    only = torch.full((1, 60), MASKED)
    only[0, 7] = 0.0
    got = filtered(only, 0.5)
    expect(torch.equal(got, only), f"The only token, 7, should be kept, but {kept(got[0])} are.")


def test_a_row_of_nan_does_not_disturb_the_others() -> None:
    """The sampler returns -1 for such a row, but filters see it."""
    torch.manual_seed(5)
    logits = torch.randn(2, 60)
    want = filtered(logits, 0.5, 0.5)[1]
    logits[0] = float("nan")
    got = filtered(logits, 0.5, 0.5)[1]
    expect(torch.equal(got, want), "Row 0 is NaN, and row 1 should not change, but it does.")


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
        expect(
            got[i] == want[i],
            f"With typical_p={p} and seed {i}, the engine should generate the tokens {want[i]}, as "
            f"with transformers' filter, but it generates {got[i]}.",
        )
    assert got != off  # else the prompt would prove nothing
