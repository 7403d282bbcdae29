"""Loads safetensors into the parts of a model, one tensor at a time.

All headers are checked first. The files are memory-mapped, so loading holds the weights once, and
the pages of one tensor.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nanovllm.api.log import progress_bar
from nanovllm.models.config import unreadable
from nanovllm.models.fp8 import KV_SCALE

HEAD = "lm_head.weight"
# Names that are skipped: tables that are computed from the config, and a tied head.
IGNORED = ("rotary_emb.inv_freq", HEAD)
PREFIX = "model."  # of all other names, unless the checkpoint has no head
# The stored dtypes that are converted to the model's.
DTYPES = ("BF16", "F16", "F32", "F64")


@dataclass(slots=True, frozen=True)
class Part:
    """A tensor of a checkpoint, which slice of it is wanted, and what stores that slice."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    store: Callable[[Tensor], object]  # converts dtype and device
    wanted: tuple[slice, ...] = (slice(None),)

    @classmethod
    def whole(cls, name: str, weight: Tensor) -> "Part":
        """All of a checkpoint tensor, which is copied to `weight`."""
        return cls(name, tuple(weight.shape), weight.copy_)


def load_weights(parts: Iterable[Part], files: list[Path]) -> None:
    """Store all parts. Raises ValueError with the tensors that do not fit them one to one, before
    anything is stored. The names may be those of the model without its head, without "model.".
    """
    if not any(name.startswith(PREFIX) for name in tensor_names(files)):
        parts = [replace(part, name=part.name.removeprefix(PREFIX)) for part in parts]
    known = {part.name: part for part in parts}
    check_headers(known, files)
    with progress_bar("Loading weights", "tensor", total=len(known)) as bar:
        for path in files:
            with open_file(path) as file:
                for name in filter(known.get, file.keys()):
                    part = known[name]
                    part.store(file.get_tensor(name)[part.wanted])
                    bar.update()


def tensor_names(files: list[Path]) -> set[str]:
    names: set[str] = set()
    for path in files:
        with open_file(path) as file:
            names.update(file.keys())
    return names


def open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # safetensors' own error types are not public
        raise unreadable(path, "a readable safetensors file", error) from None


def check_headers(known: dict[str, Part], files: list[Path]) -> None:
    """Raise ValueError if the files' tensors are not the `known` ones, each once."""
    missing, unexpected, misshapen, repeated = dict.fromkeys(known), [], [], []
    for path in files:
        with open_file(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                part = known.get(name)
                if part is None:
                    # models/fp8.py reads scales, if the KV cache is in fp8.
                    if not (name.endswith(IGNORED) or KV_SCALE.fullmatch(name)):
                        unexpected.append(name)
                    continue
                if name not in missing:
                    repeated.append(f"{name} in {path.name}")
                    continue
                del missing[name]
                tensor = file.get_slice(name)
                shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
                if shape != part.shape or dtype not in DTYPES:
                    expected = f"{part.shape} of {', '.join(DTYPES)}"
                    misshapen.append(f"{name} is {shape} of {dtype}, expected {expected}")
    wrong = []
    for what, names in (
        ("missing", list(missing)),
        ("unexpected", unexpected),
        ("misshapen", misshapen),
        ("already in another file", repeated),
    ):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            wrong.append(f"{what}: {', '.join(names[:8])}{more}")
    if wrong:
        raise ValueError(f"{files[0].parent} does not fit its config.json; {'; '.join(wrong)}")


def random_weights(parts: Iterable[Part], seed: int, device: torch.device) -> None:
    """Store small random weights, unit norms and zero biases, for load_format="dummy"."""
    generator = torch.Generator(device).manual_seed(seed % 2**63)
    for part in parts:
        if part.name.endswith("norm.weight"):
            weight = torch.ones(part.shape, device=device)
        elif part.name.endswith(".bias"):
            weight = torch.zeros(part.shape, device=device)
        else:
            weight = 0.02 * torch.randn(
                part.shape, generator=generator, device=device, dtype=torch.float32
            )
        part.store(weight[part.wanted])
