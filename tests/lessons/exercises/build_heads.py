"""What the checks of `attention` and `cache` share. build_check.py needs no torch."""

import torch
from build_check import expect, same
from torch import Tensor
from torch.nn import functional as F


def random_heads(number: int, heads: int, kv_heads: int) -> list[Tensor]:
    """Return q [n, H, D], and k and v [n, K, D], with D = 8."""
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(number, h, 8, generator=generator) for h in (heads, kv_heads, kv_heads)]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's attention of a whole text."""
    each = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def compare_heads(got: Tensor, want: Tensor, what: str) -> None:
    same([*got.shape], [*want.shape], "The shape of the result")
    wrong = [i for i in range(len(got)) if not torch.allclose(got[i], want[i], atol=1e-4)]
    if wrong:
        i = wrong[0]
        head, d = divmod(int((got[i] - want[i]).abs().argmax()), got.shape[2])
        expect(
            False,
            f"{what}: the attention of the tokens {wrong[:8]}{' and more' * (len(wrong) > 8)} "
            f"differs from torch's. Number {d} of head {head} of token {i} should be "
            f"{want[i, head, d]:.4f}, but with your code it is {got[i, head, d]:.4f}.",
        )
