"""Deferred signals: a signal during a step is recorded, and handled when the step is complete."""

import _signal  # type: ignore[import-not-found]  # ten times as fast as the functions of `signal`
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], Any]
NUMBERS = sorted(map(int, signal.valid_signals()), key=lambda n: n != signal.SIGINT)


class DeferredInterrupt:
    """A handler that records signals, and later calls the handlers that it has replaced.

    In a `with` block of this object, a repeated signal such as a second Ctrl-C is handled at once.
    """

    def __init__(self) -> None:
        self.replaced: dict[int, Handler] = {}
        self.pending: dict[int, FrameType | None] = {}
        self.is_active = False
        self.may_raise = False  # whether a repeated signal is handled at once

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again = self.may_raise and number in self.pending
        if self.is_active and not again:
            self.pending.setdefault(number, frame)
            return
        self.may_raise = False  # so that the cleanup after an error is not interrupted
        self.pending.pop(number, None)
        self.replaced[number](number, frame)
        self.may_raise = again

    def install(self) -> None:
        """Replace every handler that is a Python function, such as the handler of Ctrl-C."""
        self.is_active = True
        for number in NUMBERS:
            if callable(handler := _signal.getsignal(number)):
                self.replaced[number] = handler
                _signal.signal(number, self)

    def restore(self) -> None:
        """Restore the replaced handlers, unless the program has installed others since."""
        try:
            for number, handler in self.replaced.items():
                if _signal.getsignal(number) is self:
                    _signal.signal(number, handler)
            self.is_active = False
        except BaseException:  # raised by a handler
            self.restore()
            raise

    def check(self) -> None:
        """Call the handlers of the pending signals. For Ctrl-C this raises KeyboardInterrupt."""
        if self.pending:
            number = next(iter(self.pending))
            frame = self.pending.pop(number)
            try:
                self.replaced[number](number, frame)
            finally:
                self.check()  # also if this handler has raised

    def interruptible(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that a second Ctrl-C may interrupt at any line."""
        with self:
            return function(*args)

    def __enter__(self) -> None:
        self.may_raise = True

    def __exit__(self, *_: object) -> None:
        self.may_raise = False


@contextmanager
def defer_interrupt() -> Iterator[DeferredInterrupt]:
    """Defer signal handlers to the end of the block, or to a call of `check` in it.

        with defer_interrupt() as interrupt:
            change_state()
            with interrupt:
                work_for_long()  # a second Ctrl-C raises at once, at any line

    A handler, such as the handler of Ctrl-C, an alarm or SIGTERM, therefore cannot raise in the
    middle of a change. If blocks are nested, the outermost block calls the handlers at its end.
    Python handles signals in the main thread only, so other threads have nothing to defer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield DeferredInterrupt()
        return
    handlers = (_signal.getsignal(number) for number in NUMBERS)
    outer = next((h for h in handlers if isinstance(h, DeferredInterrupt) and h.is_active), None)
    if outer is not None:
        may_raise, outer.may_raise = outer.may_raise, False
        try:
            yield outer
        finally:
            outer.may_raise = may_raise
        return
    interrupt = DeferredInterrupt()
    try:
        interrupt.install()
        yield interrupt
    finally:
        try:
            interrupt.restore()
        finally:
            interrupt.check()
