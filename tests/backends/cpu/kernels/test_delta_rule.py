"""The CPU's kernels of the gated delta rule equal the plain functions."""

from functools import partial

import pytest
import torch
from delta_rule_cases import check_chunk, check_decode, make_layer

from nanovllm.backends.cpu.kernels import delta_rule

SIZES = [(2, 2, 16, 24), (2, 4, 32, 16), (1, 3, 24, 40)]
NEAR = {
    torch.float32: partial(torch.testing.assert_close, atol=2e-5, rtol=1e-4),
    torch.bfloat16: partial(torch.testing.assert_close, atol=2e-2, rtol=2e-2),
}


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("sizes", SIZES)
def test_decode(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows in ([3], [5, 0, 2, 1]):
        check_decode(delta_rule, make_layer(sizes, dtype), rows, NEAR[dtype])


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("sizes", SIZES)
def test_chunk(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = make_layer(sizes, dtype)
    for lengths in ([(0, True), (1, False), (2, True)], [(3, False), (63, True)], [(130, False)]):
        check_chunk(delta_rule, layer, lengths, NEAR[dtype])
    check_chunk(delta_rule, layer, [(65, True), (64, False)], NEAR[dtype], same_key=True)
