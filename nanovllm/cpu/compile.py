"""Compiles the CPU's kernels for one dtype: in this process, or once for later ones in another.

    python -m nanovllm.cpu.compile bfloat16

Later processes load the code in less than a second. A file beside it, the marker, says that all
kernels of a dtype are there.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import typeof

from nanovllm.cpu import amx, avx512, decode, int8, jit, kernels, sampler
from nanovllm.log import logger


def calls(
    dtype: torch.dtype, unit: bool | int | None, cache_dtype: torch.dtype
) -> list[tuple[Any, tuple[Any, ...]]]:
    """All kernels that two dtypes, of the model and of the KV cache, need, with the types of their
    arguments. The later ones call the earlier ones.
    """

    def empty(dims: int, number: type = np.int64) -> Any:
        return np.empty((0,) * dims, number)

    example, zeros, eps, shape = kernels.DTYPE_EXAMPLE[dtype], (0,) * 7, 0.0, (1, 1, 1, 2)
    cached = kernels.DTYPE_EXAMPLE[cache_dtype]
    store = (*zeros, empty(1), shape, 1, eps, example, cached, (1.0, 1.0))
    packs = kernels.Packs(empty(2), empty(2), empty(2, np.int32))
    work = kernels.AttentionWork(packs, packs, empty(2, np.float32))
    draw = (empty(1, np.float32), empty(1), empty(1), empty(2, np.float32), empty(1), 1)
    found: list[tuple[Any, tuple[Any, ...]]] = [
        (kernels.attend, (*zeros[:6], shape, work, example, cached, unit, 1)),
        (int8.product, (*zeros[:5], 1, 1, 1, example, 1)),
        (sampler._draw, (0, False, 0, 1, *draw)),
        (sampler._token_logprobs, (0, False, 0, 1, empty(1), empty(2, np.float64))),
        (kernels._add_rms_norm_rows, (*zeros[:5], eps, example, 0, 0)),
        (kernels._add_rms_norm, (*zeros[:5], eps, example, 1)),
        (kernels._silu_and_mul_rows, (*zeros[:4], example, 0, 0)),
        (kernels._silu_and_mul, (*zeros[:4], example, 1)),
        (kernels.norm_rope_store_rows, (*store, 0, 0)),
        (kernels.norm_rope_store, (*store, 1)),
    ]
    if unit is not None:
        sizes = (1, 1, eps, shape, empty(1), work, unit, 1)
        found.append((decode.decode_layers, (empty(2), *zeros[:6], *sizes)))
    return [(kernel, tuple(map(typeof, arguments))) for kernel, arguments in found]


def compile_all(dtype: torch.dtype, unit: bool | int | None, cache_dtype: torch.dtype) -> None:
    """Compile all kernels that two dtypes, of the model and of the KV cache, need, or load their
    code. None of them is called.
    """
    with jit.guard():
        missed = False
        for kernel, types in calls(dtype, unit, cache_dtype):
            misses = kernel.stats.cache_misses.total()
            kernel.compile(types)
            if not missed and kernel.stats.cache_misses.total() > misses:
                missed = True
                kept = "and keeping them" if jit.DIRECTORY else "not kept: set NUMBA_CACHE_DIR"
                logger.info(f"compiling the CPU kernels, which takes 20 to 40 s ({kept})")


def units(dtype: torch.dtype) -> list[bool | int | None]:
    """What attention may multiply this dtype with here; see kernels.select_attend_packs."""
    # With AMX both kernels of attention are needed: fits_amx depends on model and blocks.
    if dtype is torch.bfloat16 and amx.has_amx():
        return [None, amx.UNIT]
    if dtype is torch.bfloat16 and avx512.has_avx512_bf16():
        return [None, avx512.UNIT]
    return [None]


def marker(dtype: torch.dtype) -> Path | None:
    """The marker's path; None if Numba has no directory to keep kernels in."""
    name = f"{str(dtype)[6:]}{'-amx' if amx.has_amx() else ''}.compiled"
    return jit.DIRECTORY / name if jit.DIRECTORY else None


def compile_now(dtype: torch.dtype) -> None:
    """Compile, or wait for the process that does. It returns at once if all is compiled."""
    path = marker(dtype)
    if path is None or path.exists():
        return
    with jit.locked(path.with_suffix(".lock")):
        if not path.exists():
            for unit in units(dtype):
                compile_all(dtype, unit, dtype)
            path.touch()


def is_ready(dtype: torch.dtype) -> bool:
    """Whether the kernels are compiled. If not, this starts to compile them in the background."""
    path = marker(dtype)
    if path is None:
        logger.warning(
            "Numba finds no directory to keep compiled kernels in, so that this process runs in "
            "plain torch, which is slower; set NUMBA_CACHE_DIR"
        )
        return False
    if path.exists():
        return True
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    # A session of its own, so that Ctrl-C in this one does not stop it.
    subprocess.Popen(
        [sys.executable, "-m", "nanovllm.cpu.compile", str(dtype)[6:]],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    logger.info(
        "the CPU's kernels are compiled in the background for later starts, which takes 20 to 40 s;"
        " this process runs in plain torch, which is slower. attention_backend='numba' waits instead"
    )
    return False


if __name__ == "__main__":
    compile_now(getattr(torch, sys.argv[1]))
