"""Times attention of a decode in torch and, if it is installed, in FlashInfer.

FlashInfer reads the caches and block tables of nanovllm. torch's SDPA reads a contiguous cache.
"""

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch

from nanovllm.models.fp8 import FP8
from tools.benchmarks import kernels
from tools.benchmarks.gpu.rows import Row, headline
from tools.benchmarks.gpu.timing import DEVICE, seconds

CASES = ((1, 1024), (64, 1024), (256, 1024))  # rows, and the length of their contexts
WORKSPACE_BYTES = 128 << 20


def rows() -> Iterator[Row]:
    """Yield a row for each case and library; FlashInfer, which compiles its kernels, is last."""
    for name, case in cases():
        yield measured(name, "nanovllm", case, case.calls(case.table_tile()))
        if case.kv.dtype != FP8:
            yield measured(name, "torch's SDPA, contiguous", case, case.sdpa_calls())
    if find_spec("flashinfer") is None:
        yield headline({"peer": "FlashInfer", "note": "is not installed"})
        return
    library = import_module("flashinfer")
    for name, case in cases():
        for tensor_cores in (True, False):
            by = f"FlashInfer {library.__version__}{', tensor cores' * tensor_cores}"
            yield measured(name, by, case, flashinfer_calls(library, case, tensor_cores))


def cases() -> Iterator[tuple[str, kernels.Decode]]:
    for dtype, (num, length) in product(kernels.cache_dtypes(), CASES):
        name = f"{'fp8' if dtype == FP8 else 'bf16'}, {num} x {length} tokens"
        yield name, kernels.Decode.random([length] * num, dtype)


def measured(name: str, by: str, case: kernels.Decode, calls: list[Any]) -> Row:
    time = seconds(calls)
    row = {"peer": by, "decode": name, "us": 1e6 * time}
    return headline(row | {"GB/s": case.num_bytes / time / 1e9})


def flashinfer_calls(library: Any, case: kernels.Decode, tensor_cores: bool) -> list[Any]:
    """Return calls without their plan, which FlashInfer makes once for a step.

    Its layout HND with separate keys and values is the layout of nanovllm's caches.
    """
    pages = -(-case.lens // kernels.BLOCK)
    starts = torch.cat((pages.new_zeros(1), pages.cumsum(0))).int()
    numbers = torch.cat([t[:n] for t, n in zip(case.tables, pages.tolist(), strict=True)])
    last = (case.lens - (pages - 1) * kernels.BLOCK).int()
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", use_tensor_cores=tensor_cores
    )
    heads = (kernels.H, kernels.K, kernels.D, kernels.BLOCK)
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": case.kv.dtype}
    wrapper.plan(starts, numbers, last, *heads, **dtypes)
    return [partial(wrapper.run, case.q, (k, v)) for k, v in zip(*case.kv, strict=True)]
