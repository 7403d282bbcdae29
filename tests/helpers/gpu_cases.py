"""What the tests on a GPU share.

Their files are parts of at most five minutes each on a card, with an empty cache of Triton: a
variant of a kernel takes one or two seconds to compile, and so do the graphs of an engine.
test_dry_run.py counts the variants of each part. A case is there if it proves something else.
"""

import pytest
import torch
from torch import Tensor

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda:0"

# ||found - wanted|| / ||wanted||, against a float32 reference on the same inputs.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9) and not torch.version.hip:
        pytest.skip("no instructions for fp8")


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    difference = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    assert difference == difference, "NaN"
    return difference
