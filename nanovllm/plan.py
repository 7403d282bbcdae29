"""The interface between the engine and the runner: plain numbers in both directions, no torch.

The scheduler makes a `StepPlan`. The runner executes it and returns a `StepOutput`. vLLM calls them
`SchedulerOutput` and `ModelRunnerOutput`. A plan does not change after the scheduler returns it.
Only logits processors, grammars, and the errors that they raise are not plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias


@dataclass(slots=True)
class StepPlan:
    """The work of one step. A decode row yields a token, and a chunk yields its `result_kind`."""

    new_rows: list[NewRow] = field(default_factory=list)
    # (row, index in the block table, block) for rows that are not new.
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    # Rows that compute the token that they sampled last. With async scheduling, the step is planned
    # before this token reaches the host.
    decode_rows: list[int] = field(default_factory=list)
    num_tokens: int = 0  # computed by this step; at most the token budget

    # ---- optional features ----

    # The runner executes all saves, then all block_copies, then all loads, and then computes.
    saves: list[BlockCopy] = field(default_factory=list)  # from the device to host memory
    block_copies: list[BlockCopy] = field(default_factory=list)  # copy-on-write
    loads: list[BlockCopy] = field(default_factory=list)  # from host memory to the device
    # Copies of states of linear attention; see features/models/hybrid/states.py.
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    state_saves: list[StateSave] = field(default_factory=list)


@dataclass(slots=True)
class NewRow:
    """A row that is assigned to a sequence, with the data of the sequence for the runner."""

    row: int
    block_table: list[int]
    sampling: RowSampling

    # ---- optional features ----

    # The known tokens. Set only for rows with rules, because rules depend on them.
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Chunk:
    """Known tokens of one row that this step computes, from a prompt or a resumed sequence."""

    row: int
    start: int  # position of its first token; the KV of earlier tokens is, or will be, in the cache
    token_ids: list[int]
    result_kind: ResultKind | None  # None unless the chunk ends with the last known token

    # ---- optional features ----

    # Consecutive tokens to score. The first follows token `logprobs_from` of the chunk.
    logprob_targets: list[int] = field(default_factory=list)
    logprobs_from: int = 0
    num_logprobs: int = 0  # how many of the most likely tokens to report with each target
    num_candidates: int = 0  # number of candidates, if `result_kind` is CANDIDATES
    num_drafts: int = 0  # the last tokens that are drafts; see features/sampling/ngram.py
    # The known output of a row with rules, if it has drafts or had some in its last step.
    output: list[int] | None = None


class ResultKind(Enum):
    """The result that a row yields when its last known token has been computed."""

    TOKEN = 0  # the next token; a later step computes its KV
    HIDDEN_STATE = 1  # the hidden state of the last known token, after the final norm
    CANDIDATES = 2  # the most likely next tokens; the engine chooses one later
    NOTHING = 3  # only the log-probabilities of its targets


# Values in `StepOutput.token_ids` that are not tokens.
NO_TOKEN = -1  # no token could be sampled
COMPLETE = -2  # the row's grammar is complete


@dataclass(slots=True)
class StepOutput:
    """The results of the rows of one step."""

    # A token id, NO_TOKEN or COMPLETE for each row that yields a token, in plan order. A chunk with
    # drafts yields `num_drafts` more.
    token_ids: list[int]

    # ---- optional features ----

    # Row -> its other results, if it has any.
    results: dict[int, RowResult] = field(default_factory=dict)
    # Row -> the error of its logits processor or grammar. Its token is NO_TOKEN.
    errors: dict[int, Exception] = field(default_factory=dict)

    def result(self, row: int) -> RowResult:
        """Return the other results of a row, to fill them."""
        return self.results.setdefault(row, RowResult())


# The sampler's filters in the order in which they apply, each with the value that disables it.
FILTERS: dict[str, int | float] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(slots=True, frozen=True)
class RowSampling:
    """Sampling parameters of one row: the part of SamplingParams that the runner needs."""

    temperature: float = 0.0  # 0 is greedy
    seed: int = 0  # 64 bits; the random number is a function of (seed, position) alone
    filters: tuple[float, ...] = tuple(FILTERS.values())
    rules: LogitRules | None = None


class Runner(Protocol):
    """The interface of a runner. ModelRunner and the fake runner of the tests implement it."""

    num_blocks: int  # KV blocks for requests; the null block is not counted
    async_scheduling: bool  # default of the option: whether the device works while the host plans

    def run(self, plan: StepPlan) -> Callable[[], StepOutput]:
        """Launch one step. Returns a function that waits for the device and returns the output."""


# ---- optional features ----


class BlockCopy(NamedTuple):
    """A copy of the content of one block to another, as in copy-on-write."""

    source: int
    target: int


class StateSave(NamedTuple):
    """A copy of the state that `row` has before the last `tokens_after` tokens of this step."""

    row: int
    tokens_after: int
    target: int


# (token id, log-probability, rank) at one position: the token itself, then the most likely ones.
TokenLogprobs: TypeAlias = list[tuple[int, float, int]]


@dataclass(slots=True)
class RowResult:
    """The results of one row of a step, except its token."""

    hidden_state: list[float] = field(default_factory=list)  # [E]
    # (token id, log-probability) of its `num_candidates`, the best first.
    candidates: list[tuple[int, float]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of its tokens, if requested
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each logprob target
    first_position: int = 0  # of the first of `prompt_logprobs`


@dataclass(frozen=True)  # without slots: the runner has weak references to it
class LogitRules:
    """Rules that change or report a row's logits, as in SamplingParams. Most rows have none."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids
    # No token of `stops` is sampled before there are `min_tokens` output tokens.
    min_tokens: int = 0
    stops: tuple[int, ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # reported too
    logits_processors: tuple[Callable[..., Any], ...] = ()
    grammar: Any = None  # nanovllm.features.sampling.structured.Grammar
    thinking: Any = None  # nanovllm.engine.thinking.Thinking
