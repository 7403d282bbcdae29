"""What the tests of whole engines share."""

import threading
import time
from collections.abc import Callable
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.engine.llm_engine import LLMEngine

# A prompt whole, in chunks, planned ahead, preempted, without prefix hits, and in small blocks.
EACH_WAY: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 7},
    {"async_scheduling": True, "max_num_batched_tokens": 50},
    {"num_kv_cache_blocks": 8, "max_num_batched_tokens": 30, "async_scheduling": True},
    {"enable_prefix_caching": False, "max_num_seqs": 2},
    {"attention_backend": "sdpa", "block_size": 4, "num_kv_cache_blocks": 256},
]


def is_idle(engine: LLMEngine) -> bool:
    """No request, every block free, every row free."""
    s = engine.scheduler
    return (
        not engine.has_unfinished_requests()
        and not s.running
        and not s.waiting
        and s.block_manager.num_available == s.block_manager.num_blocks
        and len(s.free_rows) == s.max_num_seqs
    )


def run_in_threads(functions: list[Callable[[], None]]) -> None:
    """Run the functions at once. Raises the first error; a thread that hangs fails the test."""
    errors: list[BaseException] = []

    def guard(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=[f], daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def still_serves(llm: LLM) -> None:
    assert not llm.engine.has_unfinished_requests()
    assert not llm.engine.scheduler.has_work()
    assert len(llm.generate([1, 2], SamplingParams(max_tokens=2), use_tqdm=False)) == 1
