"""SharedEngine: how several threads and Ctrl-C use one engine.

`lock` protects the scheduler, the requests and their results. It is free while the runner works, so
other threads can add, abort and read requests during a step.

A step computes the requests of all threads, and one thread runs it. A thread that calls `run_step`
meanwhile waits until this step has ended, and returns. Each step holds a new lock, which the
waiting threads acquire and release. A thread that runs one step after another therefore cannot keep
them waiting.

Ctrl-C raises KeyboardInterrupt at any line of the main thread. In a step, it is handled like every
other error: the steps in flight are reverted. `hold_interrupt` holds it while results are
committed, while steps are reverted, and while other calls change the state of the engine.
"""

import functools
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from nanovllm.engine.request import Request

Engine = TypeVar("Engine", bound="SharedEngine")


@contextmanager
def hold_interrupt() -> Iterator[list[Any]]:
    """Hold Ctrl-C until the end of the block. Yields a list that is empty until it is pressed."""
    pressed: list[Any] = []
    handler = signal.getsignal(signal.SIGINT)
    # Python handles signals in the main thread only.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield pressed
        return
    signal.signal(signal.SIGINT, lambda *arguments: pressed.append(arguments))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            handler(*pressed[0])


class SharedEngine(ABC):
    requests: dict[str, Request]  # those that have not ended, by id

    def __init__(self) -> None:
        self._process = os.getpid()
        # An RLock would let the garbage collector call `abort` in the middle of a change.
        self._lock = threading.Lock()
        self._step_lock = threading.Lock()  # of the last step; it is held until that step ends
        self._step_thread = 0  # the identifier of the thread that ran it
        # Whether a step runs, or has failed and is not reverted: Ctrl-C came before that once more.
        self._is_changing = False
        self._to_abort: deque[Request] = deque()

    @property
    def lock(self) -> threading.Lock:
        """The lock of scheduler, requests and results. It is not held while the runner works.

        Raises RuntimeError in a forked process.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "this LLM was made in another process and cannot be used in one forked from it; "
                "start the process with multiprocessing.get_context('spawn') and make an LLM there"
            )
        return self._lock

    def abort(self, requests: Iterable[Request], wait: bool = False) -> None:
        """End the requests that are unfinished. A newer request with the same id is not affected.

        wait: whether to wait for the lock. A stream must not, because the garbage collector can
            close it while this thread holds the lock. Its requests then end before the next step.
        """
        self._to_abort.extend(requests)
        with hold_interrupt():
            if self._lock.acquire(blocking=wait):
                try:
                    if self._is_changing and not self._step_lock.locked():
                        self._revert_step(KeyboardInterrupt())
                    while self._to_abort:
                        self._abort_request(self._to_abort.popleft())
                finally:
                    self._lock.release()

    def run_pending_aborts(self) -> None:
        if self._to_abort:
            self.abort(())

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Hold the lock while nothing runs: requests that are added meanwhile wait for the end.

        Raises RuntimeError if a request is unfinished or a step runs.
        """
        self.run_pending_aborts()
        with self.lock:
            if self.requests or self._step_lock.locked():
                raise RuntimeError(
                    "prefix cache and weights cannot be saved, loaded or freed while requests "
                    "run; wait for their end, or abort them"
                )
            yield

    @abstractmethod
    def _abort_request(self, request: Request) -> None:
        """End a request in any state, unless it has ended. The lock is held."""

    def _revert_step(self, error: BaseException) -> None:
        self._revert(error)
        self._is_changing = False

    @abstractmethod
    def _revert(self, error: BaseException) -> None:
        """Restore a state from which all requests can continue. The lock is held."""


def run_by_one_thread(run_step: Callable[[Engine], None]) -> Callable[[Engine], None]:
    """Decorate a method that runs a step. If another thread runs one, only wait for its end."""

    @functools.wraps(run_step)
    def run_or_wait(self: Engine) -> None:
        step_lock = threading.Lock()
        with step_lock:
            with self.lock:
                if not self._step_lock.locked():
                    self._step_lock, self._step_thread = step_lock, threading.get_ident()
                current, thread = self._step_lock, self._step_thread
            if current is step_lock:
                try:
                    if self._is_changing:
                        with hold_interrupt(), self.lock:
                            self._revert_step(KeyboardInterrupt())
                    self._is_changing = True
                    self.run_pending_aborts()
                    run_step(self)
                    self.run_pending_aborts()
                    self._is_changing = False
                except BaseException as error:
                    with hold_interrupt(), self.lock:
                        self._revert_step(error)
                    raise
                return
        if thread == threading.get_ident():
            raise RuntimeError(
                "a logits processor cannot run the engine that calls it; use another LLM"
            )
        with current:
            pass

    return run_or_wait
