"""A stand-in for CUDA graphs, which re-runs what was captured."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nanovllm.backends.gpu.graphs import DecodeGraphs
from nanovllm.loading import make_runner as start
from nanovllm.loading.select_backend import pick_backend
from nanovllm.models.backend import Backend


def stand_in(decode: Callable, hidden: torch.Tensor) -> DecodeGraphs:
    def capture(function: Callable[[], None]) -> Callable[[], None]:
        function()  # as cuda_capture does, to warm up
        return function

    return DecodeGraphs(decode, hidden, lambda: capture)


def capture_with(patch: pytest.MonkeyPatch, capture_decode: Callable) -> None:
    """Let new engines capture their decode steps in this way."""

    def pick(*args: object) -> Backend:
        return replace(pick_backend(*args), capture_decode=capture_decode)  # type: ignore[arg-type]

    patch.setattr(start, "pick_backend", pick)
