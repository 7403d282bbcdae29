"""An fp8 KV cache: how keys and values are rounded, and the scales that a checkpoint may have.

The format is e4m3 (Micikevicius et al. 2022, arXiv:2209.05433): 4 bits of exponent, 3 of mantissa,
NaN but no infinity, and at most 448. Each layer has a scale for its keys and one for its values:

    stored = round(value / scale)            value = stored * scale

As the scale is the same for all keys, attention multiplies the scores by it (or q), and its result
by that of the values. Every e4m3 number is also one in bfloat16, float16 and float32, so that
nothing is rounded when the cache is read. Every query reads keys and values as they were rounded,
those of its own step too: a prompt in chunks computes the same as a whole one.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
Scales: TypeAlias = tuple[float, float]  # of the keys and of the values of a layer

# The names that vLLM reads: plain, of its attention, of ModelOpt, and of a fused projection.
KV_SCALE = re.compile(
    r"(?:model\.)?layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.|qkv_proj\.)?([kv])_scale"
)


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """x / scale in float8_e4m3fn. What is larger than 448 becomes 448, and NaN remains NaN."""
    # The conversion itself makes it NaN on some devices.
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)


def read_fp8_scales(files: Mapping[Path, Any], num_layers: int) -> list[Scales]:
    """Return the scales of each layer from open safetensors files; 1 where they have none.

    Raises ValueError for a scale that is not one finite number above 0.
    """
    scales = [{"k": 1.0, "v": 1.0} for _ in range(num_layers)]
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118 (not a dict)
            match = KV_SCALE.fullmatch(name)
            if match is None or int(match[1]) >= num_layers:
                continue
            tensor = file.get_tensor(name)
            scale = float(tensor) if tensor.numel() == 1 else math.nan
            if not 0 < scale < math.inf:
                raise ValueError(
                    f"{path}: {name} must be one finite number above 0, not {tensor.tolist()}; "
                    "use kv_cache_dtype='auto', which ignores it"
                )
            scales[int(match[1])][match[2]] = scale
    return [(scale["k"], scale["v"]) for scale in scales]
