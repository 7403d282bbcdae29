"""How a kernel is compiled, and where its code is kept: `compiled` is the decorator of all kernels.

Numba keeps compiled code in __pycache__ or in NUMBA_CACHE_DIR. It compiles a function again if its
file has changed, but it does not notice a change in the file of a function that it calls. The code
of all kernels is therefore kept in one subdirectory. Its name is a digest of all files of this
folder and the folders in it.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias

import llvmlite
import numba
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba import get_num_threads, njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache

# A function that Numba compiles. Numba has no type for it.
Kernel: TypeAlias = Any

config: Any = numba.config
if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, so Numba compiles nothing; unset it")
LOCK = threading.RLock()
# A directory unused for this many seconds is removed.
MAX_AGE = 7 * 24 * 3600
# LLVM may reorder sums and fuse products, but NaN and infinity keep their meaning.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


def has_feature(name: str) -> bool:
    """Return whether Numba compiles for the processor of this process, and it has a feature."""
    is_other = config.CPU_NAME or config.CPU_FEATURES
    return not is_other and bool(get_host_cpu_features().get(name))


@functools.cache
def kernel_lock() -> AbstractContextManager[object]:
    """Return LOCK if concurrent calls of kernels are unsafe, otherwise a context without effect.

    Without OpenMP and TBB, Numba uses "workqueue", which is not safe for several threads.
    """
    # In a separate thread, because starting Numba changes the caller's number of OpenMP threads.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(get_num_threads).result()
    layer = numba.threading_layer()  # type: ignore[attr-defined]
    return LOCK if layer == "workqueue" else nullcontext()


@contextmanager
def guard() -> Iterator[None]:
    """Hold `kernel_lock` while kernels run. Afterwards Numba has as many threads as before."""
    with kernel_lock():
        threads = get_num_threads()
        try:
            yield
        finally:
            numba.set_num_threads(threads)


def digest() -> str:
    """Return a digest of what compiled code depends on: sources, versions, processor."""
    parts = [
        *(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))),
        *(numba.__version__, llvmlite.__version__, sys.implementation.cache_tag),
        config.CPU_NAME or get_host_cpu_name(),
        config.CPU_FEATURES or get_host_cpu_features().flatten(),
    ]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[list[int]]:
    """Hold a file lock, which excludes other processes and threads.

    Yields descriptors. A child process that inherits them holds the lock until it ends. Without
    `wait`, raises BlockingIOError if another holds the lock.
    """
    try:
        import fcntl
    except ImportError:  # a system that is not POSIX
        yield []
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield [file.fileno()]


class KernelCache(FunctionCache):
    """Numba's cache, in DIRECTORY instead of the directory that Numba would use."""

    def save_overload(self, sig: Any, data: Any) -> None:
        # Numba gives the next free number to a file of code. Two processes that compile a function
        # for two dtypes at once would take the same, and load each other's code.
        with locked(Path(self.cache_path) / "save.lock"):
            super().save_overload(sig, data)

    class _impl_class(CompileResultCacheImpl):
        def __init__(self, function: Callable) -> None:
            super().__init__(function)
            self.locator.get_cache_path = lambda: str(DIRECTORY)


def make_directory() -> Path | None:
    """Make a directory for this version of the kernels in Numba's cache directory.

    Remove old ones. Return None if Numba finds no place that can be written.
    """
    try:
        locator = CompileResultCacheImpl(make_directory).locator
        path = Path(locator.get_cache_path()).absolute() / f"kernels-{digest()}"
        locator.get_cache_path = lambda: str(path)
        locator.ensure_cache_path()
        os.utime(path)
    except (RuntimeError, OSError):
        return None
    for other in path.parent.glob("kernels-*"):
        with suppress(OSError):  # another process may be removing it
            if other.stat().st_mtime < time.time() - MAX_AGE:
                shutil.rmtree(other)
    return path


DIRECTORY = make_directory()


def compiled(
    parallel: bool = False, no_nan: bool = False, exact: bool = False
) -> Callable[[Callable], Any]:
    """Return the decorator of all kernels. `parallel` makes prange parallel.

    LLVM vectorizes a maximum only with `no_nan`: the result for a NaN is then undefined. With
    `exact` it computes every operation as it is written.
    """
    fastmath = set() if exact else FASTMATH | {"nnan"} if no_nan else FASTMATH
    options: Any = dict(parallel=parallel, nogil=True, error_model="numpy", fastmath=fastmath)

    def decorate(function: Callable) -> Any:
        kernel: Any = njit(function, **options)
        if DIRECTORY:
            kernel._cache = KernelCache(function)
        return kernel

    return decorate
