"""The fp8 KV cache: the rounding of keys and values, and the scales in a checkpoint.

The format is e4m3 (Micikevicius et al. 2022, arXiv:2209.05433): 4 exponent bits, 3 mantissa bits,
NaN but no infinity, and at most 448. Each layer has one scale for keys and one scale for values:

    stored = round(value / scale)            value = stored * scale

All keys of a layer have the same scale, so attention multiplies q or the scores by the key scale,
and its output by the value scale. bfloat16, float16 and float32 represent every e4m3 number
exactly, so reading the cache does not round. Queries read rounded keys and values even for tokens
of the same step, so a prompt computed in chunks gives the same result as a whole prompt.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
Scales: TypeAlias = tuple[float, float]  # the key scale and the value scale of a layer

# The names that vLLM reads: plain, from its attention, from ModelOpt, from a fused projection.
KV_SCALE = re.compile(
    r"(?:model\.)?layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.|qkv_proj\.)?([kv])_scale"
)


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """Return x / scale in float8_e4m3fn, limited to magnitudes of 448. NaN remains NaN."""
    # Without the clamp, some devices convert larger magnitudes to NaN.
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def read_fp8_scales(files: Mapping[Path, Any], layers: list[int]) -> list[Scales]:
    """Return the scales of each of `layers` from open safetensors files. A missing scale is 1.

    Raises ValueError for a scale that is not one finite number above 0.
    """
    scales = {layer: {"k": 1.0, "v": 1.0} for layer in layers}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118 (not a dict)
            match = KV_SCALE.fullmatch(name)
            if match is None or int(match[1]) not in scales:
                continue
            tensor = file.get_tensor(name)
            scale = float(tensor) if tensor.numel() == 1 else math.nan
            if not 0 < scale < math.inf:
                raise ValueError(
                    f"{path}: {name} must be one finite number above 0, not {tensor.tolist()}; "
                    "use kv_cache_dtype='auto', which ignores it"
                )
            scales[int(match[1])][match[2]] = scale
    return [(scale["k"], scale["v"]) for scale in scales.values()]
