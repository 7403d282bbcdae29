"""The log of the package, and progress bars that appear only if the log shows INFO."""

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
    """Return a progress bar, shown after a second unless the log hides INFO."""
    quiet = not logger.isEnabledFor(logging.INFO)
    return tqdm(items, desc=what, unit=unit, total=total, delay=1, disable=quiet)
