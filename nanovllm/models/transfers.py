"""Copies between the host and the device that do not wait for the device."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it. A CPU tensor may share memory with `array`."""
    tensor = torch.from_numpy(array)
    # Copies from pinned memory are asynchronous. Pinning copies, so `array` may change later.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def send(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Move arrays to the device in one copy, each aligned to 16 bytes. See `to_device`."""
    if device.type != "cuda":
        return [to_device(x, device) for x in arrays]
    padded = [part for x in arrays for part in (x.tobytes(), bytes(-x.nbytes % 16))]
    packed = to_device(np.frombuffer(bytearray().join(padded), np.uint8), device)
    return [
        part.view(torch.from_numpy(x).dtype).view(x.shape)
        for part, x in zip(packed.split([*map(len, padded)])[::2], arrays, strict=True)
    ]


def start_copy(tensor: Tensor) -> Callable[[], Any]:
    """Start a copy to the host. The returned function waits for it and returns a list."""
    if tensor.device.type != "cuda":
        return tensor.clone().tolist  # a copy, because the next replay of a graph may overwrite it
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Any:
        copied.synchronize()
        return host.tolist()

    return wait
