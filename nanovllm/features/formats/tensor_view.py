"""TensorView: tensors of open safetensors files with other names, shapes or values.

A view has the methods of an open file that loading uses. A tensor is made when it is read.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

# The names of dtypes in safetensors.
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


class ViewedTensor(NamedTuple):
    """A tensor of a view. It has the methods of its header in safetensors."""

    shape: list[int]
    dtype: str
    read: Callable[[], Any]
    # Returns a QuantizedWeight of packed numbers, or None for other tensors.
    read_packed: Callable[[], Any] = lambda: None

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


class TensorView(dict[str, ViewedTensor]):
    get_slice = dict.__getitem__

    def get_tensor(self, name: str) -> Any:
        return self[name].read()

    def get_int4(self, name: str) -> Any:
        return self[name].read_packed()


def viewed(file: Any, name: str) -> ViewedTensor:
    """Return a tensor of an open file as it is."""
    if isinstance(file, TensorView):
        return file[name]
    header = file.get_slice(name)
    return ViewedTensor(header.get_shape(), header.get_dtype(), partial(file.get_tensor, name))
