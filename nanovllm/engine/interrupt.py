"""defer_interrupt: Ctrl-C waits until a step is complete. It changes the SIGINT handler."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def defer_interrupt() -> Iterator[Callable[[], None]]:
    """Ctrl-C in the block raises KeyboardInterrupt at its end or when the yielded function runs.

    A second Ctrl-C acts immediately. Inside another such block, outside the main thread (which
    alone receives signals), and if the program has its own SIGINT handler, this does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or before is not signal.default_int_handler:
        yield lambda: None
        return
    pressed = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, before)
