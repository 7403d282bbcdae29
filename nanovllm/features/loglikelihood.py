"""Log-likelihoods: how text is split into tokens, the task, and the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.api.checks import located
from nanovllm.api.prompts import Prompt, as_list, split_prompt
from nanovllm.engine.request import Request, rewind_prompt, start_prompt
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.task import Ending, RowResult
from nanovllm.plan import Yield

if TYPE_CHECKING:
    from nanovllm.engine.input_processor import InputProcessor
    from nanovllm.engine.llm_engine import LLMEngine


@dataclass(frozen=True)
class ScoringParams:
    """A request for the log-probabilities of the last tokens of its prompt, the continuation."""

    num_tokens: int  # of the continuation; at least one token is before them


@dataclass(frozen=True)
class LoglikelihoodOutput:
    """How likely a continuation is after its prompt, before temperature and all rules."""

    logprob: float  # natural logarithm, the sum of `token_logprobs`
    # Whether no token is more likely than that of the continuation, at each position.
    is_greedy: bool
    token_logprobs: list[float]
    token_ids: list[int]  # of the continuation
    num_cached_tokens: int  # tokens whose KV was in the prefix cache
    request_id: str


def encode_pair(
    text: str, continuation: str, encode: Callable[[str], list[int]]
) -> tuple[list[int], list[int]]:
    """Return the tokens of `text`, and those that `continuation` adds to it.

    As `_encode_pair` of lm_eval does, spaces at the end of the text belong to the continuation,
    whose tokens are those that follow the text's when both are encoded together.
    """
    stem = text.rstrip()
    ids = encode(stem) if stem else []
    return ids, encode(text + continuation)[len(ids) :]


def tokenize_pairs(
    inputs: InputProcessor,
    prompts: Prompt | Iterable[Prompt],
    continuations: Prompt | Iterable[Prompt],
) -> list[tuple[Prompt, ScoringParams]]:
    """Return each prompt with its continuation, and what to score of it."""
    stems, ends = as_list(prompts), as_list(continuations, "continuations")
    if len(stems) == 1:
        stems = stems * len(ends)
    if len(stems) != len(ends):
        raise ValueError(
            f"{len(stems)} prompts but {len(ends)} continuations; give one for each, or one "
            "prompt for all"
        )
    pairs: list[tuple[Prompt, ScoringParams]] = []
    for i, (stem, end) in enumerate(zip(stems, ends, strict=True)):
        with located(f"pair {i}: " * (len(stems) > 1)):
            ids, new = tokenize_pair(inputs, stem, end)
        pairs.append(([*ids, *new], ScoringParams(len(new))))
    return pairs


def tokenize_pair(inputs: InputProcessor, stem: Prompt, end: Prompt) -> tuple[list[int], list[int]]:
    text, ids = split_prompt(stem)
    continuation, new = split_prompt(end)
    if ids is None and new is None:
        if continuation:
            ids, new = encode_pair(text or "", continuation, inputs.encode)
    elif new is None:
        raise TypeError(
            f"the continuation {end!r:.80} is text, and its prompt is token ids: {stem!r:.80}; "
            "give both as text, or the continuation as token ids"
        )
    elif ids is None:
        ids = inputs.encode(text or "")
    if not new:
        raise ValueError("the continuation is empty; give at least one token")
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    return ids, new


class Scoring:
    """The task of a request for log-probabilities of the last tokens of its prompt."""

    yields = Yield.NOTHING

    def __init__(self, engine: LLMEngine, params: ScoringParams) -> None:
        engine.inputs.check_head()
        self.inputs, self.params = engine.inputs, params

    def text_prompt(self, text: str) -> str:
        return text

    def check_token_prompt(self) -> None:
        """Accept every prompt of token ids."""

    def max_length(self, num_tokens: int) -> int:
        # The last token to score is not computed.
        self.inputs.check_length(num_tokens, self.inputs.max_model_len + 1)
        return num_tokens - 1

    def start(self, request: Request, token_ids: list[int], max_length: int) -> Sequence:
        seq = start_prompt(request, token_ids[:-1], max_length)
        seq.first_target = len(token_ids) - self.params.num_tokens
        seq.targets = token_ids[seq.first_target :]
        request.state = {}  # position -> (token, log-probability, rank)
        return seq

    def receive(self, request: Request, seq: Sequence, result: RowResult) -> Ending | None:
        # Again from the first after a preemption, which computes them again.
        for position, entry in enumerate(result.prompt_logprobs, result.first_position):
            request.state[position] = entry[0]  # the token itself comes first
        if not seq.awaits_token:
            return None  # a chunk that is not the last
        if any(math.isnan(logprob) for _, logprob, _ in request.state.values()):
            raise ArithmeticError("there is no log-likelihood: the model computed NaN")
        return Ending("stop")

    def rewind(self, request: Request) -> list[Sequence]:
        return rewind_prompt(request)

    def output(self, request: Request) -> LoglikelihoodOutput:
        seq = request.samples[0].seq
        entries = [entry for _, entry in sorted(request.state.items())]
        return LoglikelihoodOutput(
            logprob=sum(logprob for _, logprob, _ in entries),
            is_greedy=all(rank == 1 for *_, rank in entries),
            token_logprobs=[logprob for _, logprob, _ in entries],
            token_ids=seq.targets,
            num_cached_tokens=seq.num_cached_tokens,
            request_id=request.request_id,
        )

    def error_output(self, request: Request) -> None:
        """Return None: there is no part of a log-likelihood."""


TASKS = {ScoringParams: Scoring}
