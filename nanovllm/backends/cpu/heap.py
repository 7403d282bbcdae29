"""Makes the C library keep freed memory between layers, instead of returning it to Linux.

The activations of a prompt take hundreds of MB. By default glibc requests and returns such memory
by system calls, and Linux clears each page when it is first written. With kept memory, prompts of
3,200 tokens at Qwen3-0.6B's shape take 2.05 s instead of 2.55 s. vLLM's documentation recommends
preloading another allocator, tcmalloc, which a Python package cannot do for its user.
"""

import ctypes

# The numbers of glibc's mallopt, and the limits in bytes.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
KEPT_BYTES = 1 << 29  # at the end of the heap
LARGEST_BYTES = 1 << 28  # larger pieces are returned at once, such as the weights of a head
# The heap grows by this much more than is necessary, because glibc reuses freed memory for an
# aligned piece only if it is a little larger than the piece.
SPARE_BYTES = 1 << 26


def keep_freed_memory() -> None:
    """Return what loading has left to Linux, and keep what later steps free.

    This applies to the process, and has no effect without glibc.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
        library.mallopt(MMAP_THRESHOLD, LARGEST_BYTES)
        library.mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(TOP_PAD, SPARE_BYTES)
