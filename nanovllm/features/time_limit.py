"""Calls with a time limit, for code whose time depends on its input: templates and grammars."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

T = TypeVar("T")
stack_size_lock = threading.Lock()  # threading.stack_size is a setting of the process


class Stopped(SystemExit):
    """Raised in a thread whose result is no longer needed. Ends the thread without a message."""


def call_with_limit(function: Callable[[], T], seconds: float, stack: int = 0) -> T:
    """Call `function` in another thread with a stack of `stack` bytes, and return its result.

    Raises TimeoutError(thread) after `seconds`. If this thread stops waiting, because of a timeout
    or an error such as KeyboardInterrupt, the other thread ends at its next line of Python. Code in
    C or Rust cannot be stopped.
    """
    result: futures.Future[T] = futures.Future()
    ending = threading.Lock()  # while it is held, the thread cannot end and free its identifier

    def run() -> None:
        try:
            value = function()
            with ending:
                result.set_result(value)
        except BaseException as error:  # also pyo3's PanicException
            with ending:
                result.set_exception(error)

    thread = threading.Thread(target=run, name="nanovllm limited", daemon=True)
    try:
        with stack_size_lock:
            before = threading.stack_size(stack)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
        return result.result(seconds)
    except TimeoutError:
        raise TimeoutError(thread) from None
    finally:
        with ending:
            if not result.done() and thread.ident is not None:
                identifier = ctypes.c_ulong(thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(identifier, ctypes.py_object(Stopped))
