"""Reads JSON files, and checks the types and values of their fields."""

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from nanovllm.utils.checks import KINDS, check_scalar

Fields = dict[str, tuple[type, tuple[Any, ...]]]  # name -> type, and its range or choices


def check_fields(raw: dict[str, Any], path: Path, fields: Fields) -> dict[str, Any]:
    """Return `raw` without nulls, with each known field converted to its type.

    Raises ValueError for a field of a wrong type or value.
    """
    raw = {name: value for name, value in raw.items() if value is not None}
    known = raw.keys() & fields.keys()
    return raw | {name: check_field(path, name, raw[name], *fields[name]) for name in known}


def check_field(path: Path, name: str, value: Any, kind: type, limits: tuple[Any, ...]) -> Any:
    """Return the value as `kind`. JSON may contain 1 for a float and 64.0 for an int."""
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        check_scalar(name, value, kind, limits)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return kind(value)


def unusual(raw: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return the fields that are not known, unless their value turns them off, such as 0 or []."""
    return {name: value for name, value in raw.items() if value and name not in known}


def named(fields: Mapping[str, Any]) -> str:
    """Return the fields for a message."""
    return ", ".join(f"{name}={value!r:.80}" for name, value in fields.items())


def read_json(path: Path, kind: type = dict) -> Any:
    """Return the object or list in a JSON file. Raises ValueError with the name of the file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise unreadable(path, "valid JSON", error) from None
    if not isinstance(raw, kind):
        name = type(raw).__name__
        raise ValueError(f"{path} is not valid: it must hold {KINDS[kind]}, not {name}")
    return raw


def unreadable(path: Path, what: str, error: Exception) -> ValueError:
    """Return the error for a file that could not be read or parsed."""
    try:
        with path.open("rb") as file:
            start = file.read(23)
    except OSError as failure:
        return ValueError(
            f"{path} cannot be read ({failure.strerror or failure}); replace or remove it"
        )
    if start == b"version https://git-lfs":
        return ValueError(
            f"{path} is a git-lfs pointer, not the file itself; run 'git lfs pull' in {path.parent}"
        )
    return ValueError(f"{path} is not {what}: {error}")
