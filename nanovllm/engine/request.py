"""Request: one prompt of a caller, with its state and its results. Task: what is done with it.

    Sampling    engine/sampling.py                  new tokens
    Embedding   features/tasks/embeddings/          the hidden state of the prompt's last token
    Scoring     features/tasks/loglikelihood.py     log-probabilities of the prompt's last tokens
    BeamSearch  features/tasks/beam_search.py       the most likely outputs

A task holds checked parameters. Requests with the same parameters object share a task. The data of
one request is in its Request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.progress import Progress
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.thinking import Splitter
from nanovllm.inputs import ParsedPrompt
from nanovllm.outputs import Logprob, RequestMetrics, StreamOutput
from nanovllm.plan import ResultKind, RowResult


@dataclass(slots=True)
class Sample:
    """One sequence of a request, with its text and log-probabilities."""

    seq: Sequence
    detokenizer: Detokenizer | None = None  # for stop strings and streams
    text: str = ""
    num_received: int = 0  # output tokens that its task has processed
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    splitter: Splitter | None = None  # if thinking is separated from the text
    chars_streamed: int = 0  # the part that a stream has returned so far
    tokens_streamed: int = 0
    stream_ended: bool = False


@dataclass(slots=True, eq=False)
class Request:
    task: Task
    prompt: str | None
    progress: Progress  # the counters of its call
    stream: bool = False  # it has no `output`, and `Task.read_stream` reads it while it runs
    number: int = 0  # among the requests of its call
    request_id: str = ""  # set when it is queued
    returned_by_step: bool = False  # whether `step` returns its output; else the caller reads it
    samples: list[Sample] = field(default_factory=list)  # the first computes the prompt
    is_watched: bool = False  # whether its task receives every token, as for stop strings
    state: Any = None  # the data of its task
    prompt_logprobs: dict[int, dict[int, Logprob]] | None = None  # by position, if requested
    ended: bool = False
    output: Any = None  # made by its task when it ends
    error: Exception | None = None  # the error that ended only this request
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def seqs(self) -> list[Sequence]:
        return [sample.seq for sample in self.samples]

    @property
    def num_output(self) -> int:
        return sum(sample.seq.num_output for sample in self.samples)  # tokens


class Task(ABC):
    """The engine calls these methods. An error ends only the request of the call."""

    params: Any
    result_kind: ResultKind  # the result of a row whose known tokens are computed
    changes_queues = False  # whether `receive` changes the scheduler's queues, as for beams

    def prepare(self, prompt: ParsedPrompt) -> ParsedPrompt:
        """Return the prompt to run. Text without token ids will be encoded."""
        return prompt

    def max_length(self, num_tokens: int, max_model_len: int) -> int:
        """Return the maximum length of a sequence. Raises ValueError if the prompt is too long."""
        check_length(num_tokens, max_model_len - 1, max_model_len)
        room = max_model_len - num_tokens
        return num_tokens + min(self.params.max_tokens or room, room)

    def start(self, request: Request) -> None:  # noqa: B027, most tasks override it
        """Complete a new request, which has one sample, before it is queued."""

    @abstractmethod
    def receive(self, request: Request, seq: Sequence, result: RowResult) -> None:
        """Process the result of a step for one sequence. If it ends, set its `finish_reason`."""

    @abstractmethod
    def output(self, request: Request) -> Any:
        """Return the output of a request whose samples have ended."""

    def error_output(self, request: Request) -> Any:
        """Return the output of a request for which `output` raised an error, or None."""
        return None

    def read_stream(self, request: Request) -> list[StreamOutput]:
        """Return what is new in each sample since the last call."""
        raise NotImplementedError(f"{type(self).__name__} has no streams")


def check_length(num_tokens: int, limit: int, max_model_len: int) -> None:
    """Raise ValueError if a prompt is longer than `limit` tokens."""
    if num_tokens > limit:
        raise ValueError(
            f"the prompt has {num_tokens} tokens, and may have {limit} with "
            f"max_model_len={max_model_len}; shorten it, or raise max_model_len, which "
            "the model and the KV cache limit"
        )
