"""Large calls and Python's garbage collector.

A full collection visits all objects that can be part of a reference cycle, about ten for each
request that waits or has ended. CPython starts one whenever their number has grown by a quarter.
With a million requests this takes a third of the host's time, although they are in no cycle.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FREEZE_EVERY = 1000  # requests


@contextmanager
def frozen_requests() -> Iterator[Callable[[int], None]]:
    """Exclude the objects of a call from full collections, until the end of the block.

    Yields a function that is called with the number of requests that were added or have ended. It
    calls `gc.freeze` after each FREEZE_EVERY of them, so that smaller calls change nothing. Garbage
    that is older is collected after the block.

    Nothing is frozen if the program has disabled the collector, or has frozen objects, because they
    would be unfrozen too.
    """
    may_freeze, num_frozen = gc.isenabled() and gc.get_freeze_count() == 0, 0

    def count(num: int) -> None:
        nonlocal num_frozen
        if may_freeze and num >= num_frozen + FREEZE_EVERY:
            num_frozen = num
            gc.collect(1)  # young garbage would be frozen too
            gc.freeze()

    try:
        yield count
    finally:
        if num_frozen:
            gc.unfreeze()
