"""Task: one kind of request, what its rows yield and what becomes of that.

    Sampling    engine/sampling.py            new tokens
    Embedding   features/embeddings/          the hidden state of the prompt's last token
    Scoring     features/loglikelihood.py     log-probabilities of the prompt's last tokens
    BeamSearch  features/beam_search.py       the most likely outputs

A task holds checked parameters. Requests with the same parameters share it, because a million of them
may wait: what belongs to one request is in the Request. The engine calls the methods while it holds
its lock. An error that one raises ends only the request that it works on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from nanovllm.engine.sequence import Sequence
from nanovllm.plan import TokenLogprobs, Yield

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.request import Request


@dataclass(slots=True)
class RowResult:
    """What a row of a committed step yielded in addition to a token."""

    hidden_state: list[float] = field(default_factory=list)  # [E]
    candidates: list[tuple[int, float]] = field(default_factory=list)  # (token, log-probability)
    logprobs: TokenLogprobs = field(default_factory=list)  # of its token
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    first_position: int = 0  # of the first of `prompt_logprobs`


class Ending(NamedTuple):
    """Why a sequence ends."""

    finish_reason: str
    stop_reason: int | str | None = None


class Task(Protocol):
    params: Any
    yields: Yield  # what a row yields when its known tokens are computed

    def text_prompt(self, text: str) -> str:
        """Return the text to encode for a prompt that is given as text."""

    def check_token_prompt(self) -> None:
        """Raise ValueError if a prompt cannot be token ids."""

    def max_length(self, num_tokens: int) -> int:
        """Return how many tokens a sequence may have after a prompt of `num_tokens`.

        Raises ValueError if the request can never run.
        """

    def start(self, request: Request, token_ids: list[int], max_length: int) -> Sequence:
        """Make the samples of a request. Returns the sequence that computes the prompt."""

    def receive(self, request: Request, seq: Sequence, result: RowResult) -> Ending | None:
        """Process the result of a step for one sequence. Returns why the sequence ends, if it does."""

    def rewind(self, request: Request) -> list[Sequence]:
        """Undo what a failed step has left half done. Returns the sequences that are to be queued.

        Results that were committed and not received are removed, and so computed again.
        """

    def output(self, request: Request) -> Any:
        """Return the output of a request whose samples have ended."""

    def error_output(self, request: Request) -> Any:
        """Return the output of a request for which `output` raised an error; None: there is none."""


TaskFactory: TypeAlias = "Callable[[LLMEngine, Any], Task]"  # of parameters, which it checks
