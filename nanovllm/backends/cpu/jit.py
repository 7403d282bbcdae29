"""How a kernel is compiled: `compiled` is the decorator of all kernels."""

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import numba
from filelock import FileLock
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba import get_num_threads, njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache

from nanovllm.backends.cpu import kernel_files
from nanovllm.utils.host import has_cpu_flag
from nanovllm.utils.log import logger

# A function that Numba compiles. Numba has no type for it.
Kernel: TypeAlias = Any

config: Any = numba.config
if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, so Numba compiles nothing; unset it")
LOCK = threading.RLock()
# LLVM may reorder sums and fuse products, but NaN and infinity keep their meaning.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


@functools.cache
def has_feature(name: str) -> bool:
    """Return whether Numba compiles for the processor of this process, and it has a feature."""
    is_other = config.CPU_NAME or config.CPU_FEATURES
    return not is_other and get_host_cpu_features().get(name, False)


@functools.cache
def has_sdot() -> bool:
    """Return whether LLVM knows that the processor has SDOT, Arm's dot product for int8.

    On Linux, LLVM's list of features lacks it. LLVM knows it from the name of the processor, and
    would end the process if it did not.
    """
    name = get_host_cpu_name()
    if config.CPU_NAME or config.CPU_FEATURES or name == "generic":
        return False
    return name.startswith("apple-m") or has_cpu_flag("asimddp")


@functools.cache
def has_amx(feature: str = "amx-bf16") -> bool:
    """Return whether Linux permits this process to use tiles, and Numba compiles for `feature`."""
    if sys.platform != "linux" or not has_feature(feature):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


@functools.cache
def threading_layer() -> str:
    """Return which threads run kernels: "omp", "tbb", or "workqueue", which are Numba's own."""
    # This uses another thread, because starting Numba changes the caller's number of threads.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(get_num_threads).result()
    return str(numba.threading_layer())  # type: ignore[attr-defined]


@functools.cache
def kernel_lock() -> AbstractContextManager[object]:
    """Return LOCK if concurrent calls of kernels are unsafe, otherwise a context without effect."""
    if threading_layer() != "workqueue":
        return nullcontext()
    logger.info(
        "Numba runs kernels on its own threads (workqueue), which is slower than OpenMP; "
        "if it does not find OpenMP on Linux, install the package libgomp1"
    )
    return LOCK  # these threads are not safe for several callers


@contextmanager
def guard() -> Iterator[None]:
    """Hold `kernel_lock` while kernels run. Afterwards Numba has as many threads as before."""
    with kernel_lock():
        threads = get_num_threads()
        try:
            yield
        finally:
            numba.set_num_threads(threads)


class KernelCache(FunctionCache):
    """Numba's cache, in the directory that kernel_files.py names.

    Private to Numba. Its public options have neither a directory for some functions only nor a
    lock, and would compile a kernel again after a checkout that only changes times of files.
    """

    class _impl_class(CompileResultCacheImpl):
        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__(function)
            self.locator.get_cache_path = lambda: str(kernel_files.DIRECTORY)
            self.locator.get_source_stamp = lambda: None

    def save_overload(self, sig: Any, data: Any) -> None:
        # Numba gives the next free number to a file of code. Two processes that compile a function
        # for two dtypes at once would take the same, and load each other's code.
        with FileLock(Path(self.cache_path) / "save.lock"):
            super().save_overload(sig, data)


def compiled(
    parallel: bool = False, exact: bool = False, inline: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator of all kernels. `parallel` makes prange parallel.

    With `exact` LLVM computes every operation as it is written. With `inline` the function is a
    part of each caller. A sum needs this if LLVM does not do it anyway: the process that compiles
    a caller may otherwise call the function as it is compiled alone, with another order of sums
    than in the caller's code, which later processes load.
    """
    options: Any = dict(parallel=parallel, nogil=True, error_model="numpy", forceinline=inline)
    options["fastmath"] = set() if exact else FASTMATH

    def decorate(function: Callable[..., Any]) -> Any:
        kernel: Any = njit(function, **options)
        kernel._cache = KernelCache(function)
        return kernel

    return decorate
