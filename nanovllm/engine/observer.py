"""Observer: what LLMEngine reports about its steps. nanovllm/trace.py implements it."""

from typing import Protocol

from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence


class Observer(Protocol):
    """All calls hold the engine's lock. They must not change anything in the engine."""

    def begin(self) -> None:
        """A step is about to be planned or, once its tokens have been read, committed."""

    def scheduled(self, step: InFlightStep | None) -> None:
        """A step is planned and about to be launched. None: nothing can be planned now."""

    def committed(self, step: InFlightStep, progressed: list[Sequence]) -> None:
        """A step is committed; `progressed` are the sequences that got a token."""

    def abandoned(self, error: BaseException) -> None:
        """A step failed, and all steps in flight are reverted."""
