"""Calls with a limit of time, for code whose cost its input decides: templates and grammars."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

T = TypeVar("T")
stack_size_lock = threading.Lock()  # threading.stack_size is a setting of the process


class Stopped(SystemExit):
    """Raised in a thread whose result nobody waits for. It ends the thread without a message."""


def call_with_limit(function: Callable[[], T], seconds: float, stack: int = 0) -> T:
    """Return what `function` returns in another thread, with a stack of `stack` bytes.

    Raises TimeoutError(thread) after `seconds`. A timeout, and an error in this thread such as
    KeyboardInterrupt, stop the other thread at its next line of Python. Nothing stops C or Rust.
    """
    result: futures.Future[T] = futures.Future()
    ending = threading.Lock()  # while it is held, the thread cannot end and free its number

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
                number, error = ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)
