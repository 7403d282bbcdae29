"""Finds the compiled kernels, or starts to compile them, without an import of Numba.

Numba compiles a function again if its file has changed, but it does not notice a change in the file
of a function that it calls. All kernels are therefore kept in one directory, whose name is a digest
of all files of this folder and the folders in it. In this directory an empty file, the marker, says
that all kernels of a dtype are compiled, and a file with an error says that this failed.
"""

import hashlib
import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

import torch
from filelock import FileLock, Timeout

from nanovllm.utils.child import python
from nanovllm.utils.log import logger


def digest() -> str:
    """Return a digest of the sources, the versions and the processor of compiled code."""
    parts = [
        *(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))),
        *(version("numba"), version("llvmlite"), sys.implementation.cache_tag),
        *(os.environ.get(name) for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")),
        processor(),
    ]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def processor() -> str:
    """Return a description of the processor, which is the same for processors of one kind."""
    with suppress(OSError):
        lines = set(Path("/proc/cpuinfo").read_text().splitlines())  # a set: cores are alike
        names = "model name", "flags", "Features", "CPU part"
        return "\n".join(sorted(line for line in lines if line.startswith(names)))
    return f"{platform.machine()} {platform.processor()}"


def make_directory() -> Path | None:
    """Make the directory. Return None if none can be written."""
    places = [Path(__file__).with_name("__pycache__"), Path(os.path.expanduser("~/.cache/numba"))]
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        places.insert(0, Path(chosen).absolute())
    for place in places:
        path = place / f"kernels-{digest()}"
        with suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=path).close()  # an error if it cannot be written
            return path
    return None


DIRECTORY = make_directory() if find_spec("numba") else None


def marker(dtype: torch.dtype) -> Path | None:
    """Return the path of the marker, or None if there is no directory to keep kernels in."""
    return DIRECTORY / f"{str(dtype)[6:]}.compiled" if DIRECTORY else None


def compilation_lock(path: Path) -> FileLock:
    """Return the lock of the process that compiles the kernels of the marker `path`."""
    return FileLock(path.with_suffix(".lock"))


def is_ready(dtype: torch.dtype) -> bool:
    """Return whether the kernels are compiled. If not, start to compile them in the background.

    Also returns True if Numba cannot compile at all: the error of its import says why.
    """
    if find_spec("numba") is None or "NUMBA_DISABLE_JIT" in os.environ:
        return True
    path = marker(dtype)
    if path is None:
        logger.warning(
            "there is no directory to keep compiled kernels in, so this process runs in plain "
            "torch, which is slower; set NUMBA_CACHE_DIR"
        )
        return False
    if path.exists():
        return True
    error = path.with_suffix(".error")
    if error.exists():
        logger.warning(
            f"Numba could not compile the CPU's kernels ({error.read_text():.200}), so this "
            "process runs in plain torch, which is slower. To compile them again, and to see the "
            f"whole error: {Path(sys.executable).name} -m nanovllm.backends.cpu.compile {path.stem}"
        )
        return False
    # Suppressed: another process is compiling, or none can be started. A later start tries again.
    with suppress(OSError, Timeout), compilation_lock(path).acquire(timeout=0):
        start_compiling(path.stem)
    logger.info(
        "the CPU's kernels are compiled in the background for later starts, which takes 15 to "
        "30 s; this process runs in plain torch, which is slower. attention_backend='numba' waits "
        "instead"
    )
    return False


def start_compiling(dtype: str) -> None:
    """Start a process that compiles the kernels. Ctrl-C in this process does not stop it."""
    code = f"from nanovllm.backends.cpu import compile; compile.main({dtype!r})"
    subprocess.Popen(
        python(code),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # for Linux and macOS
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # for Windows
    )
