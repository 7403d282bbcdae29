"""How several threads and Ctrl-C use one engine.

`LLMEngine.lock` protects the scheduler, the requests and their results. It is free while the runner
works, so other threads can add, abort and read requests during a step.

A step computes the requests of all threads, and one thread runs it. A thread that calls `run_step`
meanwhile waits until this step has ended, and returns. Each step holds a new lock, which the
waiting threads acquire and release. With one lock for all steps, a thread that runs one step after
another would often acquire it again before the others do.

Ctrl-C raises KeyboardInterrupt at any line of the main thread. In a step, it is handled like every
other error: the steps in flight are reverted. `hold_interrupt` holds it while results are
committed, while steps are reverted, and while other calls change the state of the engine.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def hold_interrupt() -> Iterator[None]:
    """Hold Ctrl-C until the end of the block."""
    pressed: list[Any] = []
    handler = signal.getsignal(signal.SIGINT)
    # Python handles signals in the main thread only.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    signal.signal(signal.SIGINT, lambda *arguments: pressed.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            handler(*pressed[0])


class EngineLocks:
    """The lock of an engine, and the lock of its last step."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self.lock = threading.Lock()  # of scheduler, requests and results
        self._step = threading.Lock()  # it is held until the step ends
        self._thread = 0  # the identifier of the thread that ran it

    def check_process(self) -> None:
        """Raise RuntimeError in a process that was forked from the one of the engine."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "this LLM was made in another process and cannot be used in one forked from it; "
                "start the process with multiprocessing.get_context('spawn') and make an LLM there"
            )

    @property
    def is_stepping(self) -> bool:
        return self._step.locked()

    @contextmanager
    def one_step(self) -> Iterator[bool]:
        """Yield True if this thread runs a step in the block.

        If another thread runs one, wait for its end and yield False. Raises RuntimeError if this
        thread itself runs one, and in a forked process.
        """
        self.check_process()
        own = threading.Lock()
        with own:
            with self.lock:
                if not self._step.locked():
                    self._step = own
                    self._thread = threading.get_ident()
                current, thread = self._step, self._thread
            if current is own:
                yield True
                return
        if thread == threading.get_ident():
            raise RuntimeError(
                "a logits processor cannot run the engine that calls it; use another LLM"
            )
        with current:
            pass
        yield False
