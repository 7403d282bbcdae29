"""Compiles the CPU's kernels in another process, once for each machine, dtype and version.

    python -m nanovllm.cpu.compile bfloat16

Numba keeps what it compiles in a cache directory, from which later processes load it in less than a
second. A file there, the marker, says that all kernels are in it.
"""

import fcntl
import hashlib
import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import torch

from nanovllm.cpu import kernels, sampler

logger = logging.getLogger("nanovllm")


def marker(dtype: torch.dtype) -> Path | None:
    """The marker's path; None if Numba has no directory to keep kernels in."""
    if not kernels.can_cache_code():
        return None
    config: Any = numba.config
    parts = [
        *(inspect.getsource(module) for module in (kernels, sampler)),
        *(numba.__version__, llvmlite.__version__, torch.__version__, str(dtype)),
        config.CPU_NAME or llvmlite.binding.get_host_cpu_name(),
        config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten(),
        str(use_amx(dtype)),
    ]
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
    return Path(kernels.maximum.stats.cache_path) / f"nanovllm-{digest}.compiled"


def use_amx(dtype: torch.dtype) -> bool | None:
    return True if dtype is torch.bfloat16 and kernels.has_amx() else None


def compile_now(dtype: torch.dtype) -> None:
    """Compile, or wait for the process that does. It returns at once if all is compiled."""
    path = marker(dtype)
    if path is None or path.exists():
        return
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with kernels.guard():
                kernels.compile_all(kernels.DTYPE_EXAMPLE[dtype], use_amx(dtype))
                sampler.compile_all()
            path.touch()


def start_compiling(dtype: torch.dtype) -> bool:
    """Compile in the background unless that is done. Returns whether the kernels can be loaded."""
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
