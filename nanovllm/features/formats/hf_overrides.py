"""The option hf_overrides: values that replace fields of config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nanovllm.models.model_config import FIELDS
from nanovllm.models.rope import RopeConfig
from nanovllm.utils.checks import unknown_name


def override(raw: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json with `overrides`.

    New rope fields replace the old ones except rope_theta. Raises ValueError for a field that is
    neither in the file nor used here.
    """
    nested = {field.name for field in dataclasses.fields(RopeConfig)} - {"rope_theta"} | {"type"}
    known = sorted((raw.keys() | FIELDS.keys()) - nested)
    for name in map(str, overrides):
        if name in nested:
            raise ValueError(f"hf_overrides: {name!r} is a field of 'rope_scaling'; put it there")
        if name not in known:
            raise ValueError(f"hf_overrides: {unknown_name('field of config.json', name, known)}")
    rope = raw.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_theta") is not None:
        rest = {name: value for name, value in rope.items() if name != "rope_theta"}
        raw = raw | {"rope_theta": rope["rope_theta"], "rope_parameters": rest}
    fields = {**raw, **overrides}
    if "rope_scaling" in overrides:
        fields["rope_parameters"] = None
    elif "rope_parameters" in overrides:
        fields["rope_scaling"] = None
    return fields
