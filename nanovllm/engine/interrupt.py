"""Signals wait until a step is complete. Meanwhile another handler is installed for each of them."""

import _signal  # type: ignore[import-not-found]  # the functions of `signal` take ten times as long
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]
NUMBERS = sorted(map(int, signal.valid_signals()), key=lambda n: n != signal.SIGINT)


class DeferredInterrupt:
    """A handler that notes signals, for which it later calls the handlers that it has replaced.

    As a context manager it lets a signal through that comes a second time, as Ctrl-C may.
    """

    def __init__(self) -> None:
        self.replaced: dict[int, Handler] = {}
        self.noted: dict[int, FrameType | None] = {}
        self.is_active = False
        self.may_raise = False  # whether a signal that is noted is handled if it comes again

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again = self.may_raise and number in self.noted
        if self.is_active and not again:
            self.noted.setdefault(number, frame)
            return
        self.may_raise = False  # the cleanup that follows an error is not interrupted
        self.noted.pop(number, None)
        self.replaced[number](number, frame)
        self.may_raise = again

    def install(self) -> None:
        """Replace every handler that is a function of the program, such as Ctrl-C's."""
        self.is_active = True
        for number in NUMBERS:
            if callable(handler := _signal.getsignal(number)):
                self.replaced[number] = handler
                _signal.signal(number, self)

    def restore(self) -> None:
        """Install the handlers again, unless the program has installed others since."""
        try:
            for number, handler in self.replaced.items():
                if _signal.getsignal(number) is self:
                    _signal.signal(number, handler)
            self.is_active = False
        except BaseException:  # raised by one of them
            self.restore()
            raise

    def check(self) -> None:
        """Call the handlers of the signals that came. Ctrl-C's raises KeyboardInterrupt."""
        if self.noted:
            number = next(iter(self.noted))
            frame = self.noted.pop(number)
            try:
                self.replaced[number](number, frame)
            finally:
                self.check()  # also if this one has raised

    def __enter__(self) -> None:
        self.may_raise = True

    def __exit__(self, *_: object) -> None:
        self.may_raise = False


@contextmanager
def defer_interrupt() -> Iterator[DeferredInterrupt]:
    """The handlers of signals are called at the end of the block, or where it calls `check`.

        with defer_interrupt() as interrupt:
            change_state()
            with interrupt:
                work_for_long()  # may be left at any point: a second Ctrl-C raises at once

    So no handler can raise in the middle of a change: that of Ctrl-C, of an alarm or of SIGTERM.
    Inside another such block, only that one calls them at its end. Outside the main thread, which
    alone handles signals, nothing is deferred.
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
