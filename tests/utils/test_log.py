"""The log of the package."""

import logging
import time

from engines import run_in_threads

from nanovllm.utils.log import show_log


def test_the_log_is_set_up_once(monkeypatch) -> None:
    class Slow(logging.StreamHandler):
        def __init__(self) -> None:
            time.sleep(0.1)
            super().__init__()

    logger = logging.getLogger("nanovllm")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(logging, "StreamHandler", Slow)
    run_in_threads([show_log, show_log])
    assert len(logger.handlers) == 1
