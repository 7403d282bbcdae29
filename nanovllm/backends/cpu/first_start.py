"""The very first start on a machine, which compiles the CPU's kernels without an import of Numba.

The import takes 0.15 s, and 0.9 s while Numba's modules have no bytecode. A process that runs in
plain torch does not need it, so another process imports Numba. If that fails, the next start
imports Numba itself and reports the error: a file says that it is not the first.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch

from nanovllm.api.child import python
from nanovllm.api.log import logger

IN_BACKGROUND = (
    "the CPU's kernels are compiled in the background for later starts, which takes 15 to 30 s; "
    "this process runs in plain torch, which is slower. attention_backend='numba' waits instead"
)
MARK = "kernels-begun"  # next to the directories kernels-* of jit.py, or one folder above


def folder() -> Path:
    return Path(os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).with_name("__pycache__"))


def is_first() -> bool:
    """Return whether no process has begun to compile, and this one has no use for Numba yet."""
    if "numba" in sys.modules or "NUMBA_DISABLE_JIT" in os.environ:
        return False
    found = [*folder().glob("kernels-*"), *folder().glob("*/kernels-*")]
    return not found and importlib.util.find_spec("numba") is not None


def begin(dtype: torch.dtype) -> bool:
    """Start a process that compiles the kernels, if this start is the first. Returns whether it is.

    Returns False also if the mark cannot be written.
    """
    if not is_first():
        return False
    code = (
        f"import torch; from nanovllm.backends.cpu import compile; compile.compile_alone({dtype})"
    )
    none = subprocess.DEVNULL
    try:
        folder().mkdir(parents=True, exist_ok=True)
        (folder() / MARK).touch(exist_ok=False)
        # A new session, because Ctrl-C in this one must not stop it.
        subprocess.Popen(python(code), stdin=none, stdout=none, stderr=none, start_new_session=True)
    except OSError:
        return False
    logger.info(IN_BACKGROUND)
    return True
