"""Large calls and Python's garbage collector.

A full collection visits all objects that can be part of a reference cycle. There are about ten for
each request, and none of them is in a cycle. CPython starts a full collection whenever the number
of objects has grown by a quarter. With a million requests this takes a third of the host's time.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FREEZE_EVERY = 1000  # requests


@contextmanager
def frozen_requests() -> Iterator[Callable[[int], None]]:
    """Exclude the objects of a call from full collections, until the end of the block.

    Yields a function to call with the number of requests that were added plus the number that have
    ended. It freezes all objects whenever this sum has grown by FREEZE_EVERY, so smaller calls
    freeze nothing. Garbage among the frozen objects is collected after the block.

    Nothing is frozen if the program has disabled the collector. Nothing is frozen either if the
    program has frozen objects itself, because the end of the block would unfreeze them.
    """
    may_freeze = gc.isenabled() and gc.get_freeze_count() == 0
    num_frozen = 0

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
