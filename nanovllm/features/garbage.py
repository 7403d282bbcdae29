"""Imports, large calls and Python's garbage collector.

A full collection visits all objects that can be part of a reference cycle. CPython starts one
whenever the number of objects has grown by a quarter.

The modules of torch and Numba have 300,000 objects, which stay until the process ends. Several full
collections start while they are imported, each later one takes 0.1 s longer, and at the end of the
process Python takes 0.4 s to free the objects. Each request has about ten, and none of them is in a
cycle. With a million requests full collections take a third of the host's time.

Frozen objects are not visited. gc.freeze() freezes all objects of the process.
"""

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FREEZE_EVERY = 1000  # requests
# About how many objects `frozen_imports` has frozen: one number, as a process has one collector.
num_imported = 0


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Run a block that imports torch without collections, and freeze all objects at its end.

    All existing objects of the program are frozen too, and cycles of them are then never freed.
    Nothing is frozen if torch has been imported before, because the program may have made models
    with it, or if the program has disabled the collector or has frozen objects itself.
    """
    global num_imported
    if "torch" in sys.modules or not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.collect()
    num_before = len(gc.get_objects())
    gc.disable()
    try:
        yield
    finally:
        num_imported = num_before + gc.get_count()[0]
        # Garbage would be frozen too. It has frames, which hold the variables of their callers.
        gc.collect(0)
        gc.freeze()
        gc.enable()


@contextmanager
def frozen_requests() -> Iterator[Callable[[int], None]]:
    """Exclude the objects of a call from full collections, until the end of the block.

    Yields a function to call with the number of requests that were added plus the number that have
    ended. It freezes all objects whenever this sum has grown by FREEZE_EVERY, so smaller calls
    freeze nothing. Garbage among the frozen objects is collected after the block.

    Nothing is frozen if the program has disabled the collector. Nothing is frozen either if the
    program has frozen objects itself, because the end of the block would unfreeze them.
    """
    num_frozen = 0

    @functools.cache  # counting the objects takes 0.04 s
    def may_freeze() -> bool:
        return gc.isenabled() and gc.get_freeze_count() <= num_imported

    def count(num: int) -> None:
        nonlocal num_frozen
        if num >= num_frozen + FREEZE_EVERY and may_freeze():
            num_frozen = num
            gc.collect(1)  # young garbage would be frozen too
            gc.freeze()

    try:
        yield count
    finally:
        if num_frozen:
            gc.unfreeze()
