"""Turns: chooses the thread that runs a step, while other threads and signals wait.

Several threads may use an engine. One thread at a time runs a step for the requests of all threads,
and the other threads wait for its end. `lock` is free while the runner works, so that requests can
be added and aborted during a step. Signals such as Ctrl-C are handled after the step.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from nanovllm.engine.interrupt import DeferredInterrupt, defer_interrupt
from nanovllm.engine.request import Request

REQUESTS_AT_ONCE = 1000  # requests that are added or aborted while the lock is held
# Seconds between two batches. A thread that waits for the lock would not get it without a pause.
HANDOVER = 1e-4


class Turns:
    def __init__(self, abort_request: Callable[[Request], None]) -> None:
        """`abort_request` ends a request, and is called with the lock held."""
        self._abort_request = abort_request
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._to_abort: deque[Request] = deque()
        self._step_lock = threading.Lock()  # held by the thread that runs a step
        self._stepping: int | None = None  # the identifier of this thread

    @property
    def lock(self) -> "threading.RLock":
        """Lock of scheduler, requests and results. Raises RuntimeError in a forked process."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "this LLM was made in another process and cannot be used in one forked from it; "
                "start the process with multiprocessing.get_context('spawn') and make an LLM there"
            )
        return self._lock

    @contextmanager
    def claim(
        self, on_error: Callable[[BaseException], None]
    ) -> Iterator[DeferredInterrupt | None]:
        """Let this thread run a step in the block. Ctrl-C is raised at the end of the block.

        If another thread runs a step, wait for its end and yield None. If the block raises an
        error, call `on_error` while the lock is held.
        """
        if self._stepping == threading.get_ident():
            raise RuntimeError(
                "a logits processor cannot run the engine that calls it; use another LLM"
            )
        with defer_interrupt() as interrupt:
            if not self._step_lock.acquire(blocking=False):
                with interrupt, self._step_lock:
                    pass
                yield None
                return
            self._stepping = threading.get_ident()
            try:
                self.run_pending_aborts()
                yield interrupt
            except BaseException as error:
                with self.lock:
                    on_error(error)
                raise
            finally:
                self._stepping = None
                self._step_lock.release()
                self.run_pending_aborts()

    def abort(self, requests: Iterable[Request]) -> None:
        """End the requests that are unfinished. A newer request with the same id is not affected.

        The garbage collector can call this method at any moment, for an abandoned stream, so it
        never waits. While another call holds the lock, it only records the requests. They then end
        with the current step or before the next one.
        """
        self._to_abort.extend(requests)
        self.run_pending_aborts()

    def run_pending_aborts(self) -> None:
        if not self._to_abort or self._lock._is_owned():  # type: ignore[attr-defined]
            return
        with defer_interrupt():
            while self._to_abort and self._lock.acquire(blocking=False):
                try:
                    for _ in range(min(REQUESTS_AT_ONCE, len(self._to_abort))):
                        self._abort_request(self._to_abort.popleft())
                finally:
                    self._lock.release()
                if self._to_abort:
                    time.sleep(HANDOVER)
