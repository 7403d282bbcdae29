"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout of Qwen."""

import torch
from torch import Tensor

from nanovllm.layers.norm import rms_norm


class RotaryEmbedding:
    """Owns a table of cosines and sines, [max_position, head_dim] each, made once.

    A row is (cos, cos) and (-sin, sin), halves side by side: what the two halves of a head are
    multiplied by. `factor` is linear scaling (positions divided by it; Chen et al. 2023,
    arXiv:2306.15595).
    """

    def __init__(self, head_dim: int, max_position: int, theta: float, factor: float) -> None:
        # On the CPU in float32, then moved: the same numbers on every device.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
        frequencies = 1.0 / (theta**exponents) / factor
        angles = torch.outer(torch.arange(max_position, device="cpu").float(), frequencies)
        cos, sin = angles.cos(), angles.sin()  # [P, D/2]
        table = torch.stack((torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)))
        self.cos, self.sin = table.to(torch.get_default_device(), torch.get_default_dtype())

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, 1, D]: looked up once a step, used by every layer."""
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

    q and k are normalised per head, if there are weights [D], and turned.
    """
    heads = qkv.unflatten(-1, (-1, head_dim))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return turn(q, cos, sin), turn(k, cos, sin), v


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves (a, b) -> (a cos - b sin, b cos + a sin): the tables hold the sign. x [T, heads, D]."""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin
