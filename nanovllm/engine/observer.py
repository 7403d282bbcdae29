"""Observer: what EngineCore reports about its steps. nanovllm/tools/trace/trace.py implements it."""

from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import StepOutput


class Observer:
    """Does nothing. All calls hold the engine's lock, and must not change anything in the engine."""

    def begin(self) -> None:
        """A step is about to be planned or, once its results have been read, committed."""

    def scheduled(self, step: InFlightStep | None) -> None:
        """A step is planned and about to be launched. None: nothing can be planned now."""

    def committed(self, step: InFlightStep, updated: list[Sequence], output: StepOutput) -> None:
        """A step is committed; `updated` are the sequences that got a result, from `output`."""

    def reverted(self, error: BaseException) -> None:
        """A step failed, and all steps in flight are reverted."""


NO_OBSERVER = Observer()
