"""Loads open safetensors files into a model, one tensor at a time.

All headers are checked first. The files are memory-mapped, so loading needs memory only for the
weights of the model and for the tensor that is being copied.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nanovllm.utils.log import progress_bar

LM_HEAD = "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")
# The ends of names that are skipped: tables that the config implies, a tied head, and scales of an
# fp8 KV cache, which features/formats/fp8_scales.py reads if the cache is in fp8.
IGNORED = ("rotary_emb.inv_freq", LM_HEAD, "k_scale", "v_scale")
# The ends of names of tensors that only quantized weights have.
OF_QUANTIZED = ("weight_scale", "weight_scale_inv", "scales", "qweight", "weight_packed")
PREFIX = "model."  # of all other names; a model without a head may lack it
# Stored dtypes that can be converted to the dtype of the model.
DTYPES = ("BF16", "F16", "F32", "F64")


@dataclass(slots=True, frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint, the slice of it to load, and the function that stores the slice."""

    name: str
    shape: tuple[int, ...]  # of the tensor in the checkpoint
    store: Callable[[Tensor], object]  # converts dtype and device
    slices: tuple[slice | Tensor, ...] = (slice(None),)  # or indices
    # Whether `store` accepts a QuantizedWeight of features/formats/quantized_weight.py.
    takes_int4: bool = False

    @classmethod
    def of(cls, name: str, weight: Tensor) -> "CheckpointTensor":
        """Return a checkpoint tensor that is copied to `weight` without slicing it."""
        takes_int4 = getattr(weight, "takes_int4", False)
        return cls(name, tuple(weight.shape), weight.copy_, takes_int4=takes_int4)

    def load(self, file: Any) -> None:
        """Store the slice of this tensor in an open file."""
        get_int4 = getattr(file, "get_int4", None) if self.takes_int4 else None
        weight = None if get_int4 is None else get_int4(self.name)
        self.store((file.get_tensor(self.name) if weight is None else weight)[self.slices])


def load_weights(
    tensors: Iterable[CheckpointTensor],
    files: Mapping[Path, Any],
    before_tensor: Callable[[], None] = lambda: None,
) -> None:
    """Store all tensors from open files. `before_tensor` is called before each.

    Raises ValueError with all differences, before anything is stored, if the files do not contain
    exactly `tensors`. The names in the files may all lack the prefix "model.".
    """
    if not any(name.startswith(PREFIX) for file in files.values() for name in file.keys()):  # noqa: SIM118
        tensors = [replace(tensor, name=tensor.name.removeprefix(PREFIX)) for tensor in tensors]
    known = {tensor.name: tensor for tensor in tensors}
    check_headers(known, files)
    with progress_bar("Loading weights", "tensor", total=len(known)) as bar:
        for file in files.values():
            for name in filter(known.get, file.keys()):
                before_tensor()
                known[name].load(file)
                bar.update()


def check_headers(known: dict[str, CheckpointTensor], files: Mapping[Path, Any]) -> None:
    """Raise ValueError unless the files contain each of `known` once, and no other tensors."""
    missing = dict.fromkeys(known)
    wrong: dict[str, list[str]] = {"unexpected": [], "misshapen": [], "already in another file": []}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if name not in known:
                wrong["unexpected"] += [] if name.endswith(IGNORED) else [name]
            elif name not in missing:
                wrong["already in another file"].append(f"{name} in {path.name}")
            else:
                del missing[name]
                header = file.get_slice(name)
                shape, dtype = tuple(header.get_shape()), header.get_dtype()
                if shape != known[name].shape or dtype not in DTYPES:
                    expected = f"{known[name].shape} of {', '.join(DTYPES)}"
                    wrong["misshapen"].append(f"{name} is {shape} of {dtype}, expected {expected}")
    differences = {"missing": [*missing]} | wrong
    if any(differences.values()):
        listed = "; ".join(
            f"{what}: {', '.join(names[:8])}" + f" and {len(names) - 8} more" * (len(names) > 8)
            for what, names in differences.items()
            if names
        )
        if quantized := [name for name in wrong["unexpected"] if name.endswith(OF_QUANTIZED)]:
            listed += f"; {quantized[0]} is of a quantized weight, and quantization_config in "
            listed += "config.json does not name its format"
        raise ValueError(f"{next(iter(files)).parent} does not fit config.json; {listed}")
