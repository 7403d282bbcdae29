"""Request: one prompt of a caller, with its state and its results so far.

Its task and OutputProcessor change it. The caller reads `output` when it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.task import Task
from nanovllm.outputs import Logprob, RequestMetrics
from nanovllm.plan import RowSampling

GREEDY = RowSampling(temperature=0, seed=0)


@dataclass(slots=True)
class Sample:
    """One sequence of a request, with its text and log-probabilities."""

    seq: Sequence
    detokenizer: Detokenizer | None = None  # for stop strings and streams
    text: str = ""
    num_detokenized: int = 0  # output tokens that `text` contains
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    # The part that a stream has returned so far.
    chars_streamed: int = 0
    tokens_streamed: int = 0
    stream_ended: bool = False


@dataclass(slots=True)
class Progress:
    """Counters of the requests of one call or of an engine, updated when a request changes.

    No counter is computed from all requests, because there can be a million.
    """

    num_ended: int = 0
    num_prompt_tokens: int = 0  # of requests that have their first token
    num_ended_tokens: int = 0  # output tokens of requests that have ended
    started: set[Request] = field(default_factory=set)  # have a token, and have not ended
    changed: set[Request] = field(default_factory=set)  # streams with results to read
    error: Exception | None = None  # the first error that ended a request

    @property
    def num_output_tokens(self) -> int:
        # A copy, because another thread may run a step meanwhile.
        return self.num_ended_tokens + sum(r.num_output for r in list(self.started))

    def start(self, request: Request, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens += num_prompt_tokens
        self.started.add(request)

    def end(self, request: Request) -> None:
        self.num_ended += 1
        self.num_ended_tokens += request.num_output
        self.started.discard(request)


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    arrival: int  # 0, 1, 2, ... in the order of add_request
    task: Task
    prompt: str | None
    metrics: RequestMetrics
    returned_by_step: bool  # whether `step` returns its output; else the caller reads it here
    stream: bool  # whether `read_stream` reads it while it runs; it then has no output
    progress: Progress  # the counters of its call
    samples: list[Sample] = field(default_factory=list)
    # Whether its task receives every token, as for streams, stop strings and log-probabilities.
    is_watched: bool = False
    state: Any = None  # the data of its task
    # Position -> entry, in ascending order. After a preemption, entries are computed again.
    prompt_logprobs: dict[int, dict[int, Logprob]] | None = None
    ended: bool = False
    output: Any = None  # made by its task when it ends
    error: Exception | None = None  # the error that ended only this request

    @property
    def params(self) -> Any:
        return self.task.params

    @property
    def seqs(self) -> list[Sequence]:
        return [sample.seq for sample in self.samples]

    @property
    def num_output(self) -> int:
        """Number of output tokens of all samples."""
        return sum(seq.num_output for seq in self.seqs)


def first_sequence(request: Request, token_ids: list[int], max_length: int) -> Sequence:
    """Make the first sample of a request. Returns its sequence, which computes the prompt."""
    seq = Sequence(
        request_id=request.request_id,
        arrival=request.arrival,
        token_ids=token_ids,
        num_prompt=len(token_ids),
        max_length=max_length,
        stop_token_ids=frozenset(),
        sampling=GREEDY,
        result_kind=request.task.result_kind,
        request=request,
    )
    request.samples = [Sample(seq)]
    return seq


def fork_sequence(
    parent: Sequence, token_ids: list[int], sampling: RowSampling, index: int
) -> Sequence:
    """Return a sequence that begins like `parent`, for another sample of its request."""
    return Sequence(
        request_id=parent.request_id,
        arrival=parent.arrival,
        token_ids=token_ids,
        num_prompt=parent.num_prompt,
        max_length=parent.max_length,
        stop_token_ids=parent.stop_token_ids,
        sampling=sampling,
        index=index,
        result_kind=parent.result_kind,
        parent=parent,
        num_candidates=parent.num_candidates,
        request=parent.request,
    )
