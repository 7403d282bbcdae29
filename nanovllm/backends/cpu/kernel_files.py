"""Finds the compiled kernels, or starts to compile them, without an import of Numba.

The import of Numba takes 0.15 s, and 0.9 s while its modules have no bytecode. A process that runs
in plain torch while another one compiles the kernels does not need it.

Numba compiles a function again if its file has changed, but it does not notice a change in the file
of a function that it calls. All kernels are therefore kept in one directory, whose name is a digest
of all files of this folder and the folders in it. In this directory a file, the marker, says that
all kernels of a dtype are compiled. A log says that they are being compiled, or that this failed.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

import torch

from nanovllm.utils.child import python
from nanovllm.utils.log import logger

# A directory unused for this many seconds is removed.
MAX_AGE = 7 * 24 * 3600


def digest() -> str:
    """Return a digest of what compiled code depends on: sources, versions, processor."""
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
    return platform.processor()


def make_directory() -> Path | None:
    """Make the directory, and remove old ones. Return None if none can be written."""
    places = [Path(__file__).with_name("__pycache__"), Path(os.path.expanduser("~/.cache/numba"))]
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        places.insert(0, Path(chosen).absolute())
    for place in places:
        path = place / f"kernels-{digest()}"
        with suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=path).close()  # an error if it cannot be written
            os.utime(path)
            for other in place.glob("kernels-*"):
                with suppress(OSError):  # another process may be removing it
                    if other.stat().st_mtime < time.time() - MAX_AGE:
                        shutil.rmtree(other)
            return path
    return None


DIRECTORY = make_directory() if find_spec("numba") else None


def marker(dtype: torch.dtype) -> Path | None:
    """Return the path of the marker, or None if there is no directory to keep kernels in."""
    return DIRECTORY / f"{str(dtype)[6:]}.compiled" if DIRECTORY else None


def has_kernels() -> bool:
    """Return whether the kernels of any dtype are compiled."""
    return bool(DIRECTORY and [*DIRECTORY.glob("*.compiled")])


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[int]:
    """Hold a file lock, which excludes other processes and threads.

    Yields a descriptor. A child process that inherits it holds the lock until it ends. Without
    `wait`, raises BlockingIOError if another holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield file.fileno()


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
    # Suppressed: another process is compiling, or none can be started. The next start reports it.
    with suppress(OSError), locked(path.with_suffix(".lock"), wait=False) as lock:
        report_failure(path.with_suffix(".log"), str(dtype)[6:])
        start_compiling(path.with_suffix(".log"), dtype, lock)
    logger.info(
        "the CPU's kernels are compiled in the background for later starts, which takes 15 to "
        "30 s; this process runs in plain torch, which is slower. attention_backend='numba' waits "
        "instead"
    )
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


def start_compiling(log: Path, dtype: torch.dtype, lock: int) -> None:
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
            pass_fds=(lock,),
            start_new_session=True,
        )
