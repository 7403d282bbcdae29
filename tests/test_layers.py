"""The layers against their definitions."""

import pytest
import torch

from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.norm import add_rms_norm
from nanovllm.layers.rotary import norm_and_rotate


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@pytest.mark.parametrize("rows", [1, 4, 5, 11])
@pytest.mark.parametrize("normed", [False, True])
def test_layers_are_what_they_say(rows: int, normed: bool) -> None:
    """And nothing that they are given is changed."""
    torch.manual_seed(0)
    x, qkv = torch.randn(rows, 12), torch.randn(rows, (4 + 2 * 2) * 6)
    given = x.clone(), qkv.clone()
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(silu_and_mul(x), gate * gate.sigmoid() * up)

    weight, residual = torch.randn(12), torch.randn(rows, 12)
    for before in (None, residual):
        total = x if before is None else x + before
        normed_x, found = add_rms_norm(x, before, weight, 0.01)
        torch.testing.assert_close(normed_x, rms_norm(total, weight, 0.01))
        assert torch.equal(found, total)

    angles = torch.randn(rows, 1, 3)
    cos, sin = angles.cos(), angles.sin()
    table = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    weights = (torch.randn(6), torch.randn(6)) if normed else (None, None)
    q, k, v = norm_and_rotate(qkv, 2, 6, *weights, 0.01, *table)
    for got, want, weight in zip((q, k), given[1].view(rows, 8, 6).split((4, 2, 2), 1), weights):  # noqa: B905
        plain = want if weight is None else rms_norm(want, weight, 0.01)
        torch.testing.assert_close(got, turned(plain, cos, sin))
    assert torch.equal(v, given[1].view(rows, 8, 6)[:, 6:])
    assert torch.equal(x, given[0])
    assert torch.equal(qkv, given[1])
