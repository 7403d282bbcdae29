"""Reads the scales of an fp8 KV cache from a checkpoint."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.models.fp8 import Scales

# The names that vLLM reads: plain, from its attention, from ModelOpt, from a fused projection.
KV_SCALE = re.compile(
    r"(?:model\.)?layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.|qkv_proj\.)?([kv])_scale"
)


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
