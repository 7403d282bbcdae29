"""The layers against their definitions."""

import pytest
import torch

from nanovllm.models.layers import add_rms_norm, rms_norm, rotate, silu_and_mul


def norm_by_definition(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotation_by_definition(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@pytest.mark.parametrize("rows", [1, 4, 5, 11])
def test_layers_are_what_they_say(rows: int) -> None:
    """And nothing that they are given is changed."""
    torch.manual_seed(0)
    x, heads = torch.randn(rows, 12), torch.randn(rows, 4, 6)
    given = x.clone(), heads.clone()
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(silu_and_mul(x), gate * gate.sigmoid() * up)

    weight, residual = torch.randn(12), torch.randn(rows, 12)
    for before in (None, residual):
        total = x if before is None else x + before
        normed, kept = add_rms_norm(x, before, weight, 0.01)
        torch.testing.assert_close(normed, norm_by_definition(total, weight, 0.01))
        assert torch.equal(kept, total)
    weight = torch.randn(6)
    torch.testing.assert_close(
        rms_norm(heads, weight, 0.01), norm_by_definition(heads, weight, 0.01)
    )
    angles = torch.randn(rows, 1, 3)
    cos, sin = angles.cos(), angles.sin()
    rope = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    rotated = rotate(heads, rope)
    torch.testing.assert_close(rotated, rotation_by_definition(heads, cos, sin))
    assert torch.equal(x, given[0])
    assert torch.equal(heads, given[1])
