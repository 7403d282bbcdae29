"""OutputProcessor: passes the results of steps to the tasks of requests, and collects outputs.

It owns the requests. This table shows why a sequence can end, and which code detects it:

    a stop token, or the full length     Scheduler.commit
    a complete grammar                   Scheduler.commit: the token is COMPLETE
    no token can be sampled              Scheduler.commit: the token is NO_TOKEN
    a stop string, a computed prompt     the task: `receive` returns an Ending
    an exception in `receive`            `process`, for all samples of the request
    a beam that is not continued         BeamSearch
    an abort by the caller               SharedEngine.abort
"""

import time
from typing import Any, TypeAlias

from nanovllm.engine.request import Progress, Request
from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.task import Ending
from nanovllm.outputs import GrammarError
from nanovllm.plan import RowResult, StepOutput
from nanovllm.utils.log import logger

# The output of a task: a RequestOutput, EmbeddingRequestOutput, ... If this were a union, every
# program that calls `step` would have to check the type of each output.
Output: TypeAlias = Any
NOTHING = RowResult()  # for rows with a token and no other result


class OutputProcessor:
    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, Output] = {}  # by request id; not returned by `step` yet
        self.progress = Progress()  # of all requests
        # The sequences that end with the results of the last step, by decision of `process`.
        self.endings: dict[Sequence, Ending] = {}
        # The error that interrupted a change of the scheduler's queues during the last step.
        self.queue_error: Exception | None = None

    def is_known(self, request_id: str) -> bool:
        return request_id in self.requests or request_id in self.finished

    def record_scheduled(self, seqs: list[Sequence]) -> None:
        now = time.monotonic()
        for seq in seqs:
            metrics = seq.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now

    def process(
        self, step: InFlightStep, output: StepOutput, updated: list[Sequence]
    ) -> dict[Sequence, Ending]:
        """Pass the results of a step to the tasks. Returns the sequences that the caller must end.

        updated: the sequences that have a result, in the order of the plan.
        """
        self.endings = {}
        self.queue_error = None
        if step.plan.chunks:
            self._record_first_results(updated)
        for row, error in output.errors.items():
            if (request := step.seqs[row].request) is not None:  # None if it has ended
                self._record_error(request, error)
        results = {step.seqs[row]: result for row, result in output.results.items()}
        for seq in updated:
            if seq.request.is_watched:
                results.setdefault(seq, NOTHING)
        for seq, result in results.items():
            request = seq.request
            if request is None:  # it ended while the step was in flight
                continue
            try:
                if (ending := request.task.receive(request, seq, result)) is not None:
                    self.endings[seq] = ending
            except Exception as error:  # ends only this request
                self._record_error(request, error)
                self.endings |= dict.fromkeys(request.seqs, Ending("error"))
                if request.task.changes_queues:
                    self.queue_error = error
        return self.endings

    def _record_first_results(self, seqs: list[Sequence]) -> None:
        now = time.monotonic()
        for seq in seqs:
            request = seq.request
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
                for progress in (self.progress, request.progress):
                    progress.start(request, seq.num_prompt)

    def _record_error(self, request: Request, error: Exception) -> None:
        request.error = error
        progress = request.progress
        if progress.error is None and not isinstance(error, GrammarError):
            progress.error = error  # ends the call; with a GrammarError, other requests continue
        if request.returned_by_step:  # `step` returns the result with finish_reason "error"
            logger.error("request %s failed", request.request_id, exc_info=error)

    def rewind(self) -> list[Sequence]:
        """Undo the partial changes of a failed step. Returns the sequences to queue again."""
        seqs: list[Sequence] = []
        for request in self.requests.values():
            seqs += request.task.rewind(request)
        return [seq for seq in seqs if seq.status is not Status.FINISHED]

    def collect_finished(self, seqs: list[Sequence]) -> None:
        """Make the output of each request of `seqs` if all samples of the request have finished."""
        finished = [seq.request for seq in seqs if seq.status is Status.FINISHED]
        for request in dict.fromkeys(finished):
            if request is None:  # it has ended
                continue
            if all(seq.status is Status.FINISHED for seq in request.seqs):
                self._make_output(request)
                if request.returned_by_step and request.output is not None:
                    self.finished[request.request_id] = request.output
                self._end(request)

    def _make_output(self, request: Request) -> None:
        request.metrics.finished_time = time.monotonic()
        try:
            output = request.task.output(request)
            if not request.stream:
                request.output = output
        except Exception as error:
            self._record_error(request, error)
        if request.output is None and not request.stream:
            request.output = request.task.error_output(request)

    def _end(self, request: Request) -> None:
        request.ended = True
        for progress in (self.progress, request.progress):
            progress.end(request)
        if request.stream:
            request.progress.changed.add(request)
        self.requests.pop(request.request_id, None)
        # A step in flight refers to the sequences, but must not keep the request in memory. This
        # loop is last: after an error, `collect_finished` finds the request again through them.
        for seq in request.seqs:
            seq.request = None
