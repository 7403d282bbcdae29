"""Finds the compiled kernels, or starts to compile them, without an import of Numba.

Numba compiles a function again if its file has changed, but it does not notice a change in the file
of a function that it calls. All kernels are therefore kept in one directory, whose name is a digest
of all files of this folder and the folders in it, and of the files whose constants kernels contain.
In this directory an empty file, the marker, says that all kernels of a dtype are compiled.
"""

import hashlib
import os
import subprocess
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile

import torch
from filelock import FileLock, Timeout

from nanovllm.utils.child import python
from nanovllm.utils.host import cpu_has_fast_bf16
from nanovllm.utils.log import logger


def digest() -> str:
    """Return a digest of the sources, the version of Numba and the kind of processor.

    Numba itself tells the code for two processors of a kind apart.
    """
    folder = Path(__file__).parent
    paths = *sorted(folder.rglob("*.py")), folder.parent / "int4.py", folder.parent / "int8.py"
    sources = [path.read_bytes() for path in paths]
    processor = torch.backends.cpu.get_cpu_capability(), cpu_has_fast_bf16()
    parts = *sources, version("numba"), *processor
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def make_directory() -> Path:
    """Make the directory. Raises ImportError if none can be written."""
    default, home = str(Path(__file__).with_name("__pycache__")), "~/.cache/numba"
    for place in filter(None, (os.environ.get("NUMBA_CACHE_DIR"), default, home)):
        path = Path(os.path.expanduser(place)).absolute() / f"kernels-{digest()}"
        with suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=path).close()  # an error if it cannot be written
            return path
    raise ImportError("there is no directory to keep compiled kernels in; set NUMBA_CACHE_DIR")


DIRECTORY = make_directory()


def marker(dtype: torch.dtype) -> Path:
    """Return the path of the marker. Who compiles its kernels locks the file *.lock."""
    return DIRECTORY / f"{str(dtype)[6:]}.compiled"


def is_ready(dtype: torch.dtype) -> bool:
    """Return whether the kernels are compiled. If not, start to compile them in the background.

    Also returns True if Numba compiles nothing: the import of jit.py raises an error.
    """
    path = marker(dtype)
    if path.exists() or "NUMBA_DISABLE_JIT" in os.environ:
        return True
    code = "import torch; from nanovllm.backends.cpu.compile import compile_now; "
    code += f"compile_now({dtype})"
    # Suppressed: another process is compiling, or none can be started. A later start tries again.
    with suppress(OSError, Timeout), FileLock(path.with_suffix(".lock")).acquire(timeout=0):
        subprocess.Popen(
            python(code),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in this process does not stop the other.
            start_new_session=True,  # for Linux and macOS
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # for Windows
        )
    logger.info(
        "the CPU's kernels are compiled in the background for later starts, which takes 15 to "
        "30 s; this process runs in plain torch, which is slower. attention_backend='numba' waits "
        "instead, and raises an error if they cannot be compiled"
    )
    return False
