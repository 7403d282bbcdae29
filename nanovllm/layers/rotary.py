"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout of Qwen."""

import torch
from torch import Tensor

from nanovllm.layers.norm import normalized
from nanovllm.layers.parts import in_parts


class RotaryEmbedding:
    """Owns a table of cosines and sines [max_position, head_dim], made once.

    A plain object, not a module: it has nothing to load. `factor` is linear scaling
    (positions divided by it; Chen et al. 2023, arXiv:2306.15595).
    """

    def __init__(self, head_dim: int, max_position: int, theta: float, factor: float) -> None:
        # On the CPU in float32, then moved: the same numbers on every device.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
        frequencies = 1.0 / (theta**exponents) / factor
        angles = torch.outer(torch.arange(max_position, device="cpu").float(), frequencies)
        table = torch.stack((angles.cos(), angles.sin()))  # [2, P, D/2]
        self.cos, self.sin = table.to(torch.get_default_device(), torch.get_default_dtype())

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, 1, D/2]: looked up once a step, used by every layer."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def norm_and_rotate(
    qkv: Tensor,
    kv_heads: int,
    head_dim: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The packed projection [T, (H + 2K) D] -> q [T, H, D], k and v [T, K, D].

    q and k are normalised per head if there are weights [D], and turned; v stays as it is. The two
    go through as one: on a CPU a decode's few tokens cost what the calls cost.
    """
    heads = qkv.unflatten(-1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * kv_heads

    def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        both = heads[:, : num_heads + kv_heads]
        if q_weight is not None and k_weight is not None:
            both = normalized(both, eps)
            both[:, :num_heads] *= q_weight
            both[:, num_heads:] *= k_weight
        return rotate(both, cos, sin)

    q, k = in_parts(turned, heads, cos, sin).split([num_heads, kv_heads], dim=1)
    return q, k, heads[:, num_heads + kv_heads :]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D]: turn the pair (x[i], x[i + D/2]) by the angle of its position."""
    halves = x.unflatten(-1, (2, -1))  # [T, H, 2, D/2]
    a, b = halves.unbind(dim=2)
    out = halves * cos.unsqueeze(-2)
    first, second = out.unbind(dim=2)
    first.addcmul_(b, sin, value=-1)  # a cos - b sin
    second.addcmul_(a, sin)  # b cos + a sin
    return out.flatten(-2)
