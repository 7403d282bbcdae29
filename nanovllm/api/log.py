"""The log of the package, and the progress bars that are shown with it."""

import logging
import threading
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

logger = logging.getLogger("nanovllm")
LOCK = threading.Lock()


def show_log() -> None:
    """Print the log to stderr, unless the program configures logging itself."""
    with LOCK:
        if logger.handlers or logger.level != logging.NOTSET:
            return
        handler = logging.StreamHandler()
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def progress_bar(
    what: str, unit: str, items: Iterable[Any] | None = None, total: int | None = None
) -> "tqdm[Any]":
    """A bar of work that takes more than a second; none if the log hides INFO."""
    quiet = not logger.isEnabledFor(logging.INFO)
    return tqdm(items, desc=what, unit=unit, total=total, delay=1, disable=quiet)
