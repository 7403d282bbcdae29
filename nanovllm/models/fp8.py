"""The fp8 KV cache: the rounding of keys and values.

The format is e4m3 (Micikevicius et al. 2022, arXiv:2209.05433): 4 exponent bits, 3 mantissa bits,
NaN but no infinity, and at most 448. Each layer has one scale for keys and one scale for values:

    stored = round(value / scale)            value = stored * scale

All keys of a layer have the same scale, so attention multiplies q or the scores by the key scale,
and its output by the value scale. bfloat16, float16 and float32 represent every e4m3 number
exactly, so reading the cache does not round. Queries read rounded keys and values even for tokens
of the same step, so a prompt computed in chunks gives the same result as a whole prompt.
features/formats/fp8_scales.py reads the scales of a checkpoint.
"""

from typing import TypeAlias

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
Scales: TypeAlias = tuple[float, float]  # the key scale and the value scale of a layer


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """Return x / scale in float8_e4m3fn, limited to magnitudes of 448. NaN remains NaN."""
    # Without the clamp, some devices convert larger magnitudes to NaN.
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
