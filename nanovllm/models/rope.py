"""The frequencies of rotary position embedding for each rope type.

All types but the first let a model read more positions than it was trained with:

    default   theta ** (-2 i / D)  (Su et al. 2021, arXiv:2104.09864)
    linear    all divided by `factor`  (Chen et al. 2023, arXiv:2306.15595)
    llama3    only low frequencies are divided, with a smooth transition  (Llama 3.1)
    yarn      as llama3, with a linear transition over i, and larger logits
              (Peng et al. 2023, arXiv:2309.00071)

The results equal `ROPE_INIT_FUNCTIONS` of transformers, which is the reference of the tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# The supported types, and the fields that they require.
REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
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

    @property
    def extended_length(self) -> int:
        """The number of positions that yarn extends to; 0 for other types."""
        is_yarn = self.rope_type == "yarn"
        return int(self.factor * self.original_max_position_embeddings) if is_yarn else 0

    def frequencies(self, dim: int) -> tuple[Tensor, float]:
        """Return the frequencies [D / 2] in float32 on the CPU, and a factor for cos and sin."""
        exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
        powers = self.rope_theta**exponents
        frequencies = 1.0 / powers
        if self.rope_type == "linear":
            return frequencies / self.factor, 1.0
        if self.rope_type == "llama3":
            return self._llama3(frequencies), 1.0
        if self.rope_type == "yarn":
            return self._yarn(powers, dim), self._attention_factor()
        return frequencies, 1.0

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Divide by `factor` the frequencies with few rotations in the original length."""
        rotations = self.original_max_position_embeddings / (2 * math.pi / frequencies)
        low, high = self.low_freq_factor, self.high_freq_factor
        share = ((rotations - low) / (high - low)).clamp(0, 1)  # of the unchanged frequency
        return (1 - share) * frequencies / self.factor + share * frequencies

    def _yarn(self, powers: Tensor, dim: int) -> Tensor:
        """Divide frequencies by `factor`: none above `beta_fast` rotations, all below `beta_slow`,
        and in between a share that grows linearly."""

        def index_of(rotations: float) -> float:
            """Return the i whose frequency rotates this often in the original length."""
            length = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return dim * math.log(length) / (2 * math.log(self.rope_theta))

        low = max(math.floor(index_of(self.beta_fast)), 0)
        high: float = min(math.ceil(index_of(self.beta_slow)), dim - 1)
        high += 0.001 if low == high else 0
        ramp = (torch.arange(dim // 2, device="cpu").float() - low) / (high - low)
        unchanged = 1 - ramp.clamp(0, 1)
        return 1.0 / (self.factor * powers) * (1 - unchanged) + 1.0 / powers * unchanged

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(max(self.factor, 1.0)) + 1.0
