"""SamplingParams: how the tokens of one request are drawn and when it ends.

Owns: the values, checked when they are built. Given: keyword arguments with vLLM's names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.config import check_int, unknown_name


@dataclass(frozen=True)
class SamplingParams:
    """Raises TypeError for a wrong type or an unknown field, ValueError for a wrong value."""

    n: int = 1  # samples of each prompt; the prompt is computed once
    temperature: float = 1.0  # divides the logits; 0 is greedy
    top_p: float = 1.0  # keep the smallest set of likely tokens with this much probability
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1 keeps all
    min_p: float = 0.0  # keep tokens at least this likely, relative to the likeliest
    seed: int | None = None  # same seed, same tokens, in whatever batch; None: the engine draws one
    max_tokens: int = 64  # output tokens
    stop_token_ids: Sequence[int] = ()  # end the output, beside the checkpoint's own
    ignore_eos: bool = False  # go on past the checkpoint's end-of-sequence tokens

    def __new__(cls, *args: Any, **fields: Any) -> SamplingParams:
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise TypeError(unknown_name("sampling parameter", name, known))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, not {value!r}")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], not {self.min_p}")
        check_int("n", self.n, 1)
        check_int("top_k", self.top_k, -1)
        check_int("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        if isinstance(self.stop_token_ids, str | bytes) or not isinstance(
            self.stop_token_ids, Sequence
        ):
            raise TypeError(f"stop_token_ids must be a list of ints, not {self.stop_token_ids!r}")
        for token in self.stop_token_ids:
            check_int("a stop token id", token, 0)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
