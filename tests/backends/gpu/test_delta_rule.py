"""The kernels of the gated delta rule in the interpreter, compared with the plain reference.

The interpreter computes bfloat16 incorrectly: test_gpu_kernels.py tests it. It has no TF32.
"""

import os

import pytest
import torch
from delta_rule_cases import (
    Lengths,
    check_chunk,
    check_decode,
    make_inputs,
    make_layer,
    make_states,
)
from torch import Tensor

triton = pytest.importorskip("triton")
VERSION = tuple(int(x) for x in triton.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or VERSION < (3, 7),
    reason="needs Triton's interpreter with loops up to the value of a tensor (3.7 or later)",
)

from nanovllm.backends.gpu.kernels import delta_rule  # noqa: E402
from nanovllm.features.models.hybrid.delta_rule import Segments  # noqa: E402

TOLERANCE = {torch.float32: 1e-4, torch.float16: 6e-3}


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


# (Hk, Hv, Dk, Dv), with 1, 2 and 3 value heads per key head. The sizes of heads are padded.
SIZES = [(2, 2, 16, 24), (1, 2, 24, 16), (1, 3, 16, 40)]
SEGMENTS: list[Lengths] = [
    *([(length, is_first)] for length in (0, 1, 2, 3) for is_first in (True, False)),
    [(63, True), (65, False)],
    [(64, False), (0, True), (2, False), (130, True), (1, False)],
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decode(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_decode(delta_rule, make_layer(sizes, dtype), [4, 0, 3], close)


def test_decode_with_padding_rows() -> None:
    """Several rows may be the padding row, whose state is of no use."""
    torch.manual_seed(0)
    layer = make_layer(SIZES[0], torch.float32)
    x, (conv, rule) = make_inputs(layer, 4), make_states(layer)
    wanted = delta_rule.decode(layer, x[:1], conv.clone(), rule.clone(), torch.tensor([1]))
    found = delta_rule.decode(layer, x, conv, rule, torch.tensor([1, 5, 5, 5]))
    close(found[:1], wanted)


@pytest.mark.parametrize("lengths", SEGMENTS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_chunk(lengths: Lengths, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_chunk(delta_rule, make_layer(SIZES[1], dtype), lengths, close)


@pytest.mark.parametrize("sizes", SIZES[::2], ids=str)
def test_chunk_with_other_heads(sizes: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    layer = make_layer(sizes, torch.float32)
    check_chunk(delta_rule, layer, [(67, False), (5, True)], close)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_repeated_keys(dtype: torch.dtype) -> None:
    """Powers of the triangular system would overflow."""
    torch.manual_seed(0)
    layer = make_layer(SIZES[1], dtype)
    check_chunk(delta_rule, layer, [(130, False)], close, same_key=True)


def test_the_lists_are_sent_once() -> None:
    segments = Segments([3, 1], [0, 70], [70, 72], [True, False])
    table, tiles = delta_rule.tables(segments, torch.device("cpu"))
    assert table.tolist() == [[3, 0, 70, 0, 0], [1, 70, 72, 1, 2]]
    assert tiles.tolist() == [[3, 0, 70, 0, 0], [3, 0, 70, 0, 64], [1, 70, 72, 1, 70]]
    assert delta_rule.tables(segments, torch.device("cpu"))[0] is table
