"""Compiles the CPU's kernels for one dtype, in this process or in another one in the background.

    python -m nanovllm.backends.cpu.compile bfloat16

Later processes load the code in less than a second. A file next to the code, the marker, says that
all kernels of a dtype are compiled. A log next to it says that they are being compiled, or that
this failed.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numba import typeof

from nanovllm.api.child import python
from nanovllm.api.log import logger
from nanovllm.backends.cpu import fused_decode, int4, int8, jit, parallel, pointwise, sampler
from nanovllm.backends.cpu.first_start import IN_BACKGROUND
from nanovllm.backends.cpu.jit import Kernel
from nanovllm.backends.cpu.parallel import Types
from nanovllm.backends.cpu.primitives import DTYPE_EXAMPLE
from nanovllm.backends.cpu.units.amx import AMX
from nanovllm.backends.cpu.units.any import Unit, attend
from nanovllm.backends.cpu.units.unit import units


def kernels_in_parts(unit: Unit, dtype: torch.dtype) -> list[Kernel]:
    """Return the kernels that backends/cpu/parallel.py calls."""
    return [
        unit.attend_groups,
        *([unit.linear_blocks] if unit.linear_dtype is dtype else []),
        pointwise.add_rms_norm_rows,
        pointwise.silu_and_mul_rows,
        pointwise.norm_rope_store_rows,
        sampler._weigh_chunks,
        sampler._draw_rows,
        sampler._logprobs_of_rows,
        int8.quantize_rows,
        int8.product_blocks,
        int4.int4_blocks,
    ]


def calls(dtype: torch.dtype, unit: Unit, cache_dtype: torch.dtype) -> list[tuple[Kernel, Types]]:
    """Return all kernels for the dtypes of the model and the KV cache, with their arguments' types.

    The later ones call the earlier ones.
    """
    example, cached = DTYPE_EXAMPLE[dtype], DTYPE_EXAMPLE[cache_dtype]
    in_parts = [
        (kernel, parallel.example_arguments(kernel, dtype, cache_dtype))
        for kernel in kernels_in_parts(unit, dtype)
    ]
    step = fused_decode.example_step(example, example)
    callers = [
        *((parallel.in_parts, (0, arguments, 1, 1)) for _, arguments in in_parts),
        (attend, (*[0] * 6, step.shape, step.work, example, cached, 0, 1)),
        (int8.product, ((0, 0), *[0] * 11, example, 1)),
    ]
    if unit.linear_dtype is dtype is cache_dtype:
        layers = fused_decode.Code(*[0] * 6), step, np.empty((0, 0), np.int64)
        callers.append((fused_decode.decode_layers, layers))
    called = [(kernel, (*arguments, 0, 0)) for kernel, arguments in in_parts]
    return [(kernel, tuple(map(typeof, arguments))) for kernel, arguments in called + callers]


def compile_all(dtype: torch.dtype, unit: Unit, cache_dtype: torch.dtype) -> None:
    """Compile all kernels for the dtypes of the model and the KV cache, or load their code.

    No kernel is called.
    """
    with jit.guard():
        missed = False
        for kernel, argument_types in calls(dtype, unit, cache_dtype):
            misses = kernel.stats.cache_misses.total()
            kernel.compile(argument_types)
            if not missed and kernel.stats.cache_misses.total() > misses:
                missed = True
                kept = "and keeping them" if jit.DIRECTORY else "not kept: set NUMBA_CACHE_DIR"
                logger.info(f"compiling the CPU kernels, which takes 15 to 30 s ({kept})")


def marker(dtype: torch.dtype) -> Path | None:
    """Return the path of the marker, or None if Numba has no directory to keep kernels in."""
    name = f"{str(dtype)[6:]}{'-amx' if AMX.is_available() else ''}.compiled"
    return jit.DIRECTORY / name if jit.DIRECTORY else None


def compile_now(dtype: torch.dtype) -> None:
    """Compile, or wait for the process that does. It returns at once if all is compiled."""
    path = marker(dtype)
    if path is None or path.exists():
        return
    with jit.locked(path.with_suffix(".lock")):
        compile_marked(dtype)


def compile_marked(dtype: torch.dtype) -> None:
    """Compile what is not compiled, and leave the marker. The caller's process holds the lock."""
    path = marker(dtype)
    if path is not None and not path.exists():
        # All of them: which one a model uses depends on its sizes and the size of blocks.
        for unit in units(dtype):
            compile_all(dtype, unit, dtype)
        path.touch()
        path.with_suffix(".log").unlink(missing_ok=True)


def compile_alone(dtype: torch.dtype) -> None:
    """Compile in the process of first_start.py, unless another one does. Errors go to the log."""
    path = marker(dtype)
    if path is None:
        return
    with suppress(BlockingIOError), jit.locked(path.with_suffix(".lock"), wait=False):
        with path.with_suffix(".log").open("w") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())
        compile_marked(dtype)


def is_ready(dtype: torch.dtype) -> bool:
    """Return whether the kernels are compiled. If not, start to compile them in the background."""
    path = marker(dtype)
    if path is None:
        logger.warning(
            "Numba finds no directory to keep compiled kernels in, so this process runs in plain "
            "torch, which is slower; set NUMBA_CACHE_DIR"
        )
        return False
    if path.exists():
        return True
    # Suppressed: another process is compiling, or none can be started. The next start reports it.
    with suppress(OSError), jit.locked(path.with_suffix(".lock"), wait=False) as lock:
        report_failure(path.with_suffix(".log"), str(dtype)[6:])
        start_compiling(path.with_suffix(".log"), dtype, lock)
    logger.info(IN_BACKGROUND)
    return False


def report_failure(log: Path, name: str) -> None:
    """Warn if a process that no longer runs has left its log, which it removes when it is done."""
    if log.exists():
        lines = log.read_text(errors="replace").split("\n")
        reason = next((line for line in reversed(lines) if line.strip()), "without a message")
        logger.warning(
            f"an earlier start could not compile the CPU's kernels in the background "
            f"({reason:.200}); it is tried again. The command that shows the whole error, or "
            "compiles them: "
            f"{os.path.basename(sys.executable)} -m nanovllm.backends.cpu.compile {name}"
        )


def start_compiling(log: Path, dtype: torch.dtype, lock: list[int]) -> None:
    """Start the process, which holds the lock until it ends, however it does."""
    code = (
        f"import torch; from nanovllm.backends.cpu import compile; compile.compile_marked({dtype})"
    )
    with log.open("w") as errors:
        # A new session, because Ctrl-C in this one must not stop it.
        subprocess.Popen(
            python(code),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=lock,
            start_new_session=True,
        )


if __name__ == "__main__":
    compile_now(getattr(torch, sys.argv[1]))
