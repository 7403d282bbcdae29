"""Checks of fields and their names. Each error says what is accepted.

A field accepts the values of its type: Annotated[int, 1, 9] is a number from 1 to 9, and
Annotated[str, "a", "b"] is one of these strings.
"""

import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TypeAlias, TypeVar

T = TypeVar("T")
KINDS = {
    int: "an int",
    float: "a number",
    bool: "True or False",
    str: "a string",
    list: "a list",
    dict: "an object",
}
Positive: TypeAlias = Annotated[int, 1, math.inf]
Seed: TypeAlias = Annotated[int, -(2**63), 2**64 - 1]


@functools.cache
def scalar_fields(cls: type) -> dict[str, tuple[type, tuple[Any, ...], bool]]:
    """Return the scalar fields of a dataclass: name -> (type, limits, whether it may be None).

    A scalar field has a type of KINDS. Its limits are the lowest and the highest number, or the
    strings to choose from.
    """
    fields = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        members = typing.get_args(hint) if is_union else (hint,)
        hints = [member for member in members if member is not type(None)]
        is_annotated = typing.get_origin(hints[0]) is Annotated
        kind, *limits = typing.get_args(hints[0]) if is_annotated else hints[:1]
        if len(hints) == 1 and kind in KINDS:
            fields[name] = kind, tuple(limits), len(members) > 1
    return fields


def check_scalars(thing: Any) -> None:
    """Check the type and the value of every scalar field of a dataclass object.

    A scalar of NumPy or torch is replaced by the number that it holds.
    """
    cls: Any = type(thing)
    for name, (kind, limits, optional) in scalar_fields(cls).items():
        value = getattr(thing, name)
        if value is not None or not optional:
            # A dataclass may be frozen.
            object.__setattr__(thing, name, check_scalar(name, value, kind, limits))


def check_scalar(name: str, value: Any, kind: type, limits: tuple[Any, ...] = ()) -> Any:
    """Return a value of the type `kind`, and a scalar of NumPy or torch as the number it holds.

    Raises TypeError or ValueError for a wrong value. The message says what is accepted.
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    accepted: Any = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} must be {KINDS[kind]}, not {value!r:.200}")
    if kind in (str, list, dict):
        if limits and value not in limits:
            raise ValueError(f"{name} must be one of {', '.join(limits)}, not {value!r}")
        return value
    low, high = limits or (-math.inf, math.inf)
    if not (low <= value <= high and abs(value) < 1e30):  # NaN fails too
        if math.isfinite(high):
            bound = f"between {low} and {high}"
        elif low == -math.inf:
            bound = "between -1e+30 and 1e+30"
        else:
            bound = f"at least {low}" + ", and less than 1e+30" * (value >= low)
        raise ValueError(f"{name} must be {bound}, not {value}")
    return value


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return an error message for an unknown name. It suggests the most similar known name."""
    known = list(known)
    return f"unknown {kind} {name!r}; {similar(name, known) or 'known: ' + ', '.join(known)}"


def from_dict(kind: Callable[..., T], what: str, given: Mapping[str, Any]) -> T:
    """Return `kind(**given)`, of a dataclass `kind`. Errors name the option `what`.

    Raises ValueError for an unknown name or a wrong value, and TypeError for a wrong type.
    """
    known = kind.__dataclass_fields__  # type: ignore[attr-defined]
    for name in given:
        if name not in known:
            raise ValueError(unknown_name(f"field of {what}", str(name), known))
    with located(f"{what}: "):
        return kind(**given)


def similar(name: str, known: Iterable[str]) -> str:
    """Return "did you mean ...?" with the most similar known name; empty if there is none."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]!r}?" if near else ""


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put `where` before the message of a TypeError or ValueError that the block raises."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{where}{error}") from error
