"""What the results of a step do to requests: errors, outputs and ends.

The lock of the engine is held, except in `check_generated`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.plan import RowResult, StepOutput
from nanovllm.utils.errors import GenerationError, GrammarError
from nanovllm.utils.log import logger

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

ONLY_A_TOKEN = RowResult()
# Fields of SamplingParams that exclude tokens. One or several of them can exclude every token.
MASKS = "structured_outputs", "allowed_token_ids", "bad_words", "min_tokens", "logits_processors"


def receive(
    engine: LLMEngine, step: InFlightStep, updated: list[Sequence], output: StepOutput
) -> None:
    """Pass the results of a step to the tasks, and end the requests that are complete.

    `updated` are the sequences that got a result.
    """
    for row, error in output.errors.items():
        if (request := step.seqs[row].request) is not None:  # it has not ended
            record_error(request, error)
    results = {step.seqs[row]: result for row, result in output.results.items()}
    for seq in updated:
        if seq.request.is_watched:
            results.setdefault(seq, ONLY_A_TOKEN)
    for seq, result in results.items():
        if (request := seq.request) is not None:  # it has not ended
            try:
                request.task.receive(request, seq, result)
            except Exception as error:  # ends only this request
                if request.task.changes_queues:  # they may be inconsistent
                    raise
                fail(request, error)
    seqs = (*updated, *results)
    end(engine, [seq.request for seq in seqs if seq.finish_reason is not None])


def fail(request: Request, error: Exception) -> None:
    """Give all samples the finish reason "error". `end` ends the request."""
    record_error(request, error)
    for seq in request.seqs:
        seq.finish_reason, seq.stop_reason, seq.forks = "error", None, []


def record_error(request: Request, error: Exception) -> None:
    request.error = request.error or error
    progress = request.progress
    if progress.error is None and not isinstance(error, GrammarError):
        progress.error = error  # ends the call; with a GrammarError, other requests continue
    if request.returned_by_step:  # `step` returns the result with finish_reason "error"
        logger.error("request %s failed", request.request_id, exc_info=error)


def end(engine: LLMEngine, requests: Iterable[Request | None]) -> None:
    """Finish sequences with a finish reason. Make the output of each request that has ended."""
    for request in dict.fromkeys(requests):
        if request is None:  # it has ended before
            continue
        for seq in request.seqs:
            if seq.finish_reason is not None:
                engine.scheduler.finish(seq, seq.finish_reason, seq.stop_reason)
        if all(seq.status is Status.FINISHED for seq in request.seqs):
            _make_output(engine, request)
            request.ended = True
            for progress in (engine.progress, request.progress):
                progress.end(request)
            if request.stream:
                request.progress.changed.add(request)
            engine.requests.pop(request.request_id, None)
            # A step in flight refers to the sequences, but must not keep the request in memory.
            for seq in request.seqs:
                seq.request = None


def _make_output(engine: LLMEngine, request: Request) -> None:
    request.metrics.finished_time = time.monotonic()
    request.metrics.num_preemptions = sum(seq.preemptions for seq in request.seqs)
    if request.stream:
        return
    try:
        request.output = request.task.output(request)
    except Exception as error:
        record_error(request, error)
        request.output = request.task.error_output(request)
    if request.returned_by_step and request.output is not None:
        engine.finished[request.request_id] = request.output


def why_no_token(params: Any) -> str:
    """Return why no token could be sampled for a request with these SamplingParams."""
    masks = [name for name in MASKS if getattr(params, name)]
    return "the model computed NaN" + f", or {' and '.join(masks)} hid every token" * bool(masks)


def check_generated(requests: list[Request]) -> None:
    """Raise GenerationError if requests have ended with finish_reason "error"."""
    outputs = [request.output for request in requests]
    reasons = {
        f"prompts[{i}] (request {request.request_id})": str(
            request.error or why_no_token(request.task.params)
        )
        for i, request in enumerate(requests)
        if any(sample.finish_reason == "error" for sample in request.output.outputs)
    }
    if reasons:
        message = (
            f"no token could be sampled for {', '.join(reasons)}: "
            f"{'; '.join(dict.fromkeys(reasons.values()))}; the attribute `outputs` of this error "
            "has the results of all requests"
        )
        raise GenerationError(message, outputs)
