"""Observer: methods that LLMEngine calls during a step. nanovllm/cli/trace has one."""

from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import StepOutput


class Observer:
    """An observer that does nothing. Calls hold the engine's lock and must not modify anything."""

    def begin(self) -> None:
        """Called before a step is planned and, after its results are read, before its commit."""

    def scheduled(self, step: InFlightStep | None) -> None:
        """Called when a step is planned, before its launch. None: nothing can be planned now."""

    def committed(self, step: InFlightStep, updated: list[Sequence], output: StepOutput) -> None:
        """Called when a step is committed. `updated`: the sequences with a result in `output`."""

    def reverted(self, error: BaseException) -> None:
        """Called when a step has failed and all steps in flight are reverted."""


NO_OBSERVER = Observer()
