"""Rotary position embedding: its tables, and their frequencies for each rope type.

All types but the first let a model read more positions than it was trained with:

    default   theta ** (-2 i / D)  (Su et al. 2021, arXiv:2104.09864)
    linear    all divided by `factor`  (Chen et al. 2023, arXiv:2306.15595)
    llama3    only low frequencies are divided, with a smooth transition  (Llama 3.1)
    yarn      as llama3, with a linear transition over i, and larger logits
              (Peng et al. 2023, arXiv:2309.00071)
    longrope  each divided by a factor of its own, a short or a long one  (Ding et al. 2024,
              arXiv:2402.13753)

transformers computes all but the first.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.models.layers import Rope

# The supported types, and the fields that they require.
REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True)
class RopeConfig:
    """The fields of `rope_parameters` in config.json, with the same names."""

    rope_theta: float = 10_000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # positions in training
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None  # None: derived from `factor`
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    llama_4_scaling_beta: float = 0.0  # of queries beyond the original positions
    short_factor: tuple[float, ...] = ()  # [R / 2]
    long_factor: tuple[float, ...] = ()  # if requests can be longer than the original positions
    partial_rotary_factor: float = 1.0  # the part of a head that is rotated; with 0, none is

    def frequencies(self, dim: int, max_len: int = 0) -> tuple[Tensor, float]:
        """Return the frequencies [R / 2] in float32 on the CPU, and a factor for cos and sin.

        R is the rotated part of `dim`, and `max_len` the length of the longest request.
        """
        if self.rope_type == "default":
            dim = int(dim * self.partial_rotary_factor)
            exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
            return 1.0 / self.rope_theta**exponents, 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        # What these functions read of a config of transformers, which would warn of other fields.
        config: Any = SimpleNamespace(head_dim=dim, hidden_size=dim, num_attention_heads=1)
        config.rope_parameters = asdict(self)
        config.max_position_embeddings = self.original_max_position_embeddings
        config.standardize_rope_params = lambda: None
        return ROPE_INIT_FUNCTIONS[self.rope_type](config, torch.device("cpu"), max_len)


class RotaryEmbedding:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864): rotates x[i] with x[i + D / 2].

    It owns a table of cos and sin for each of `ropes` [2, ropes, max_len, D], with rows (cos, cos)
    and (-sin, sin), in the dtype and on the device of `like`. `scale` multiplies the products of
    queries and keys.
    """

    def __init__(
        self, dim: int, max_len: int, ropes: Sequence[RopeConfig], like: Tensor, scale: float = 1.0
    ) -> None:
        # The CPU computes the tables in float32, so that all devices have the same numbers.
        tables = []
        for rope in ropes:
            frequencies, factor = rope.frequencies(dim, max_len)
            angles = torch.outer(torch.arange(max_len, device="cpu").float(), frequencies)
            rest = (0, dim // 2 - len(frequencies))  # pairs that are not rotated
            cos = F.pad(angles.cos() * factor, rest, value=1.0) * scale**0.5
            sin = F.pad(angles.sin() * factor, rest) * scale**0.5
            tables.append(torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))))
        self.max_len = max_len
        self.table = torch.stack(tables, dim=1).to(like)

    def at(self, positions: Tensor) -> list[Rope]:
        """Look up cos and sin [T, 1, D] of positions [T] for each of the ropes, once per step.

        Those of all ropes are contiguous, which the kernels of a CPU rely on.
        """
        cos, sin = self.table.index_select(2, positions).unsqueeze(3)
        return list(zip(cos, sin, strict=True))
