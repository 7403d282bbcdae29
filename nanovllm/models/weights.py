"""Loads safetensors into the model's weights, one tensor at a time.

It changes the tensors of the model's `checkpoint_tensors`. The files are memory-mapped, so loading
holds the weights once, and the pages of one tensor.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from nanovllm.models.config import unreadable

# Names that are skipped: tables that are computed from the config, and a tied head.
IGNORED = ("rotary_emb.inv_freq", "lm_head.weight")
# The stored dtypes that are converted to the model's.
DTYPES = ("BF16", "F16", "F32", "F64")


def load_weights(places: dict[str, Tensor], files: list[Path]) -> None:
    """Fill all places. Raises ValueError with the tensors that do not fit them one to one."""
    missing, unexpected, misshapen, repeated = dict.fromkeys(places), [], [], []
    with tqdm(total=len(places), desc="Loading weights", unit="tensor", delay=1) as bar:
        for path in files:
            try:
                reader = safe_open(path, framework="pt")
            except Exception as error:  # safetensors' own error types are not public
                raise unreadable(path, "a readable safetensors file", error) from None
            with reader as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    place = places.get(name)
                    if place is None:
                        if not name.endswith(IGNORED):
                            unexpected.append(name)
                        continue
                    if name not in missing:
                        repeated.append(f"{name} in {path.name}")
                        continue
                    tensor = file.get_slice(name)
                    shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
                    if shape != tuple(place.shape) or dtype not in DTYPES:
                        expected = f"{tuple(place.shape)} of {', '.join(DTYPES)}"
                        misshapen.append(f"{name} is {shape} of {dtype}, expected {expected}")
                    else:
                        place.copy_(file.get_tensor(name))
                    del missing[name]
                    bar.update()
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


def random_weights(places: dict[str, Tensor], seed: int) -> None:
    """Fill all places for load_format="dummy": small random weights, unit norms, zero biases."""
    device = next(iter(places.values())).device
    generator = torch.Generator(device).manual_seed(seed % 2**63)
    for name, place in places.items():
        if name.endswith("norm.weight"):
            place.fill_(1.0)
        elif name.endswith(".bias"):
            place.zero_()
        else:
            noise = torch.randn(
                place.shape, generator=generator, device=device, dtype=torch.float32
            )
            place.copy_(noise * 0.02)
