"""Observer: what LLMEngine reports about its steps. nanovllm/trace.py implements it."""

from typing import Protocol

from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence


class Observer(Protocol):
    """One thread at a time calls it. All calls but `begin` and `computed` hold the engine's lock."""

    def begin(self) -> None:
        """A step is about to be planned."""

    def scheduled(self, step: InFlightStep | None) -> None:
        """A step is planned; None if there is only a step in flight to commit, or nothing to do."""

    def computed(self) -> None:
        """The tokens of the oldest step in flight have been read and are about to be committed."""

    def committed(self, step: InFlightStep, progressed: list[Sequence]) -> None:
        """A step is committed; `progressed` are the sequences that got a token."""

    def abandoned(self, error: BaseException) -> None:
        """A step failed, and all steps in flight are reverted."""
