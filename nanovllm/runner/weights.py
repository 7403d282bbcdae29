"""safetensors -> weights, one tensor at a time.

Given: where each tensor goes (the model's `checkpoint_tensors`). Mutates: those tensors. The files
are mapped, not read, so loading holds the weights once and one tensor of the file's pages.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

# Old checkpoints hold what is computed from the config here, or repeat a tied head.
IGNORED = ("rotary_emb.inv_freq", "lm_head.weight")


def load_weights(places: dict[str, Tensor], files: list[Path]) -> None:
    """Fill every place from the files. Raises ValueError that names each tensor that is wrong."""
    missing, unexpected, misshapen = dict.fromkeys(places), [], []
    with tqdm(total=len(places), desc="Loading weights", unit="tensor", delay=1) as bar:
        for path in files:
            try:
                opened = safe_open(path, framework="pt")
            except Exception as error:  # safetensors' own error types are not public
                raise ValueError(f"{path} is not a readable safetensors file: {error}") from None
            with opened as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    place = places.get(name)
                    if place is None:
                        if not name.endswith(IGNORED):
                            unexpected.append(name)
                        continue
                    shape = tuple(file.get_slice(name).get_shape())
                    if shape != tuple(place.shape):
                        misshapen.append(f"{name} is {shape}, expected {tuple(place.shape)}")
                    else:
                        place.copy_(file.get_tensor(name))
                    missing.pop(name, None)
                    bar.update()
    wrong = []
    for what, names in (
        ("missing", list(missing)),
        ("unexpected", unexpected),
        ("misshapen", misshapen),
    ):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            wrong.append(f"{what}: {', '.join(names[:8])}{more}")
    if wrong:
        raise ValueError(f"{files[0].parent} does not fit its config.json; {'; '.join(wrong)}")


def random_weights(places: dict[str, Tensor], seed: int) -> None:
    """load_format="dummy": normal weights of a small scale, unit norms, zero biases."""
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
