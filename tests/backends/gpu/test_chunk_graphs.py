"""The sizes of captured steps with chunks. test_dry_run.py runs the graphs."""

import pytest

from nanovllm.backends.gpu.attention import SHARED_TOKENS
from nanovllm.backends.gpu.chunk_graphs import token_sizes


@pytest.mark.parametrize("maximum", [1, 16, 48, 200, 512, 8192])
def test_token_sizes(maximum: int) -> None:
    sizes = token_sizes(maximum)
    assert sizes == sorted({*sizes})
    assert sizes[-1] == min(maximum, SHARED_TOKENS)
    for num in range(1, sizes[-1] + 1):  # padding stays a small share
        size = next(size for size in sizes if size >= num)
        assert size - num < max(16, num / 4), (num, size)
