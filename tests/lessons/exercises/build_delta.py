"""Checks `step`: python -m lessons build delta --check FILE"""

import pytest
import torch
from build_check import expect, load
from torch import Tensor, tensor

step = load("delta.py", "step")
NAMES = ("states", "q", "k", "v", "g", "beta")


def random_token(seed: int, heads: int, key: int, value: int) -> list[Tensor]:
    """States, q, k, v, g and beta. The keys have length 1."""
    rng = torch.Generator().manual_seed(seed)
    shapes = ((heads, key, value), (heads, key), (heads, key), (heads, value))
    states, q, k, v = (torch.randn(shape, generator=rng) for shape in shapes)
    g, beta = -torch.rand(heads, generator=rng), torch.rand(heads, generator=rng)
    return [states, q, k / k.norm(dim=-1, keepdim=True), v, g, beta]


def by_definition(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of one head."""
    state = g.exp() * state
    state = state + torch.outer(k, beta * (v - state.T @ k))
    return state, state.T @ q


def check(token: list[Tensor], what: str) -> Tensor:
    """Compare a step with the definition. Returns the states."""
    given = [x.clone() for x in token]
    got = step(*given)
    for name, x, before in zip(NAMES, given, token, strict=True):
        expect(x.equal(before), f"{what}: `step` changes {name}, which is the caller's.")
    heads = [by_definition(*head) for head in zip(*token, strict=True)]
    both = map(torch.stack, zip(*heads, strict=True))
    for name, x, want in zip(("the states", "the outputs"), got, both, strict=True):
        is_right = x.shape == want.shape and torch.allclose(x, want, atol=1e-5)
        x, want = [[round(y, 2) for y in z.flatten().tolist()][:8] for z in (x, want)]
        expect(is_right, f"{what}: {name} should begin with {want}, but they begin with {x}.")
    return torch.as_tensor(got[0])


def test_the_example() -> None:
    head = [[8.0], [12.0]], [1.0, 0.0], [0.6, 0.8], [10.0], 0.5, 1.0
    token = [tensor([x]) for x in head]
    token[4] = token[4].log()
    check(token, "The example")


@pytest.mark.parametrize(("key", "value"), [(2, 1), (2, 2), (3, 5), (16, 8)])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_heads(heads: int, key: int, value: int) -> None:
    token = random_token(heads, heads, key, value)
    check(token, f"{heads} heads of Dk={key} and Dv={value}")


def test_many_tokens() -> None:
    states = torch.zeros(2, 4, 3)
    for number in range(1, 21):
        token = [states, *random_token(number, 2, 4, 3)[1:]]
        states = check(token, f"Token {number} of a text, 2 heads of Dk=4 and Dv=3")


def test_a_second_value_replaces_the_first() -> None:
    token = random_token(0, 2, 4, 3)
    token[5] = torch.ones(2)
    states, _ = step(*token)
    got = torch.einsum("hkv,hk->hv", states, token[2])
    what = "With beta = 1, the value that the states have for the key should be the token's value."
    expect(torch.allclose(got, token[3], atol=1e-5), what)
