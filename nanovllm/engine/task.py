"""Task: one kind of request. It defines the results of rows and makes the output of a request.

    Sampling    engine/sampling.py            new tokens
    Embedding   features/requests/embeddings/          the hidden state of the prompt's last token
    Scoring     features/requests/loglikelihood.py     log-probabilities of the prompt's last tokens
    BeamSearch  features/requests/beam_search.py       the most likely outputs

A task holds checked parameters. Requests with the same parameters share a task, which saves memory
if a million requests wait. The data of one request is in its Request. The engine calls the methods
while it holds its lock. An error in a method ends only the request that is passed to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from nanovllm.engine.sequence import Sequence
from nanovllm.plan import ResultKind, RowResult

if TYPE_CHECKING:
    from nanovllm.engine.input_processor import InputProcessor
    from nanovllm.engine.request import Request


class Ending(NamedTuple):
    """The reason why a sequence ends."""

    finish_reason: str
    stop_reason: int | str | None = None


class Task(ABC):
    params: Any
    result_kind: ResultKind  # the result of a row whose known tokens are computed
    changes_queues = False  # whether `receive` changes the scheduler's queues

    def prepare(
        self, text: str | None, token_ids: list[int] | None
    ) -> tuple[str | None, list[int] | None]:
        """Return the text and the token ids of a prompt. Text without ids will be encoded.

        Raises ValueError if the prompt cannot be token ids.
        """
        return text, token_ids

    @abstractmethod
    def max_length(self, num_tokens: int) -> int:
        """Return the maximum length of a sequence with a prompt of `num_tokens`.

        Raises ValueError if the request can never run.
        """

    @abstractmethod
    def start(self, request: Request, token_ids: list[int], max_length: int) -> Sequence:
        """Make the samples of a request. Returns the sequence that computes the prompt."""

    @abstractmethod
    def receive(self, request: Request, seq: Sequence, result: RowResult) -> Ending | None:
        """Process the result of a step for one sequence. Returns why it ends, if it does."""

    def rewind(self, request: Request) -> list[Sequence]:
        """Undo the partial changes of a failed step. Returns the sequences to queue.

        Results that were committed and not received are removed, so that they are computed again.
        Without sampling, this is the result of the prompt.
        """
        for seq in request.seqs:
            seq.awaits_token = False
        return request.seqs

    @abstractmethod
    def output(self, request: Request) -> Any:
        """Return the output of a request whose samples have ended."""

    def error_output(self, request: Request) -> Any:
        """Return the output of a request for which `output` raised an error, or None."""
        return None


TaskFactory: TypeAlias = "Callable[[InputProcessor, Any], Task]"  # checks the parameters
