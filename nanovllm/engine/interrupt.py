"""Ctrl-C waits until a step is complete. Meanwhile another SIGINT handler is installed."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class DeferredInterrupt:
    """A SIGINT handler that remembers Ctrl-C. As a context manager it lets a second one through."""

    def __init__(self) -> None:
        self.pressed = False
        self.may_raise = False  # whether a second Ctrl-C raises KeyboardInterrupt at once

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.pressed and self.may_raise:
            self.may_raise = False  # the cleanup that follows is not interrupted
            raise KeyboardInterrupt
        self.pressed = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self.pressed:
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self.may_raise = True

    def __exit__(self, *_: object) -> None:
        self.may_raise = False


@contextmanager
def defer_interrupt() -> Iterator[DeferredInterrupt]:
    """Ctrl-C in the block raises KeyboardInterrupt at its end, or where the block calls `check`.

        with defer_interrupt() as interrupt:
            change_state()
            with interrupt:
                work_for_long()  # may be left at any point: a second Ctrl-C raises at once

    Inside another such block, only that one raises at its end. Outside the main thread, which alone
    receives signals, and if the program has its own SIGINT handler, nothing is deferred.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(before, DeferredInterrupt):
        may_raise, before.may_raise = before.may_raise, False
        try:
            yield before
        finally:
            before.may_raise = may_raise
    elif not is_main or before is not signal.default_int_handler:
        yield DeferredInterrupt()
    else:
        handler = DeferredInterrupt()
        signal.signal(signal.SIGINT, handler)
        try:
            yield handler
            handler.check()
        finally:
            signal.signal(signal.SIGINT, before)
