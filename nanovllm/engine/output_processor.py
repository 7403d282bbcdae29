"""OutputProcessor: passes the results of steps to the tasks of requests, and collects outputs.

It owns the requests. This table shows why a sequence can end, and which code detects it:

    a stop token, or the full length     Scheduler.commit
    a complete grammar                   Scheduler.commit: the token is COMPLETE
    no token can be sampled              Scheduler.commit: the token is NO_TOKEN
    a stop string, a computed prompt     the task: `receive` returns an Ending
    an error in its request's data       `process`, which ends all samples of the request
    a beam that is not continued         BeamSearch
    an abort by the caller               EngineCore.abort
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
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
        # `ended` has the sequences that end with the results of the last step. `failed` has the
        # requests for which an error was raised while these results were processed.
        self.ended: dict[Sequence, Ending] = {}
        self.failed: list[Request] = []

    def is_known(self, request_id: str) -> bool:
        return request_id in self.requests or request_id in self.finished

    def record_scheduled(self, seqs: list[Sequence]) -> None:
        now = time.monotonic()
        for seq in seqs:
            metrics = seq.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now

    def process(self, step: InFlightStep, output: StepOutput, updated: list[Sequence]) -> None:
        """Pass the results to the tasks. After this, `endings` returns the sequences to end."""
        self.ended = {}
        self.failed = []
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
            with self._contain_errors(request):
                if (ending := request.task.receive(request, seq, result)) is not None:
                    self.ended[seq] = ending

    def _record_first_results(self, seqs: list[Sequence]) -> None:
        now = time.monotonic()
        for seq in seqs:
            request = seq.request
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
                self.progress.start(request, seq.num_prompt)
                if request.progress is not None:
                    request.progress.start(request, seq.num_prompt)

    def endings(self) -> dict[Sequence, Ending]:
        """Return an ending for each sequence in `ended` and for all sequences of `failed`."""
        return self.ended | {seq: Ending("error") for r in self.failed for seq in r.seqs}

    @contextmanager
    def _contain_errors(self, request: Request) -> Iterator[None]:
        """Record an error raised in the `with` block, so that only this request ends."""
        try:
            yield
        except Exception as error:
            self._record_error(request, error)
            self.failed.append(request)

    def _record_error(self, request: Request, error: Exception) -> None:
        request.error = error
        progress = request.progress
        if progress is not None and progress.error is None and not isinstance(error, GrammarError):
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
            if request is not None and request.num_unfinished == 0:
                self._make_output(request)
                if request.returned_by_step and request.output is not None:
                    self.finished[request.request_id] = request.output
                self._end(request)

    def _make_output(self, request: Request) -> None:
        request.metrics.finished_time = time.monotonic()
        with self._contain_errors(request):
            output = request.task.output(request)
            if not request.stream:
                request.output = output
        if request.output is None and not request.stream:
            request.output = request.task.error_output(request)

    def _end(self, request: Request) -> None:
        request.ended = True
        self.progress.end(request)
        if request.progress is not None:
            request.progress.end(request)
            if request.stream:
                request.progress.changed.add(request)
        self.requests.pop(request.request_id, None)
        # A step in flight refers to the sequences, but must not keep the request in memory. This
        # loop is last: after an error, `collect_finished` finds the request again through them.
        for seq in request.seqs:
            seq.request = None
