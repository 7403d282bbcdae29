"""Ctrl-C, held back while the engine's accounts are half-made. Mutates: the process's SIGINT handler."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Hold back Ctrl-C to the end of the block, or to a call of the function that this yields.

    A second one acts at once. Within another such block, and where the program handles SIGINT in a
    way of its own, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # only the main thread sees signals
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield lambda: None  # somebody has plans of his own for Ctrl-C
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, before)
