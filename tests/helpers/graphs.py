"""A stand-in for CUDA graphs, which re-runs what was captured."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.backends.gpu.graphs import DecodeGraphs
from nanovllm.loading import make_runner as start
from nanovllm.loading.select_backend import pick_backend
from nanovllm.models.backend import Backend


def stand_in(
    decode: Callable, positions: np.ndarray, min_over_ranks: Callable[[int], int]
) -> DecodeGraphs:
    def capture(function: Callable[[], None]) -> Callable[[], None]:
        function()  # as CudaCapture does, to warm up
        return function

    return DecodeGraphs(decode, positions, torch.device("cpu"), lambda: capture, min_over_ranks)


def capture_with(patch: pytest.MonkeyPatch, capture_decode: Callable) -> None:
    """Let new engines capture their decode steps in this way."""

    def pick(*args: Any) -> Backend:
        backend = pick_backend(*args)
        vars(backend).update(captures=True, capture_decode=capture_decode)
        return backend

    patch.setattr(start, "pick_backend", pick)
