"""The seam between the engine and the runner, without torch: numbers in both directions.

The scheduler makes a `StepPlan`; the runner executes it and returns a `StepOutput`. In vLLM they
are `SchedulerOutput` and `ModelRunnerOutput`. A plan is not changed once the scheduler returns it.
The only other objects are a request's logits processors and grammar, and the errors that they raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

# (token id, log-probability, rank) at one position: the token itself, then the most likely ones.
TokenLogprobs: TypeAlias = list[tuple[int, float, int]]


@dataclass(slots=True)
class StepPlan:
    """One step. Chunks yield what they say, and every decode row yields a token."""

    joins: list[Join] = field(default_factory=list)
    # (row, index in the block table, block) for rows that joined in an earlier step.
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    # The runner makes all saves, then all block_moves, then all loads, before it computes anything.
    # Of block_moves it reads all sources before it writes. Host blocks are numbered from 0.
    saves: list[BlockMove] = field(default_factory=list)  # from the device to host memory
    block_moves: list[BlockMove] = field(default_factory=list)
    loads: list[BlockMove] = field(default_factory=list)  # from host memory to the device
    chunks: list[Chunk] = field(default_factory=list)
    # Rows whose input is the token that they sampled last. The engine may not know it yet, because
    # it can be computed before it reaches the host.
    decode_rows: list[int] = field(default_factory=list)
    num_tokens: int = 0  # computed by this step; at most the token budget


@dataclass(slots=True)
class Join:
    """A sequence takes a row. Contains all that the runner needs to know about the sequence."""

    row: int
    block_table: list[int]
    sampling: RowSampling
    # The known tokens. They are set only for rows with rules, which depend on them.
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Chunk:
    """Known tokens of one row, from a prompt or a resumed sequence, that this step computes."""

    row: int
    start: int  # position; all earlier KV is in the cache or is stored before any query attends
    token_ids: list[int]
    yields: Yield | None  # None unless it ends with the last known token of the row
    # Tokens to score, one after the other. The first follows token `logprobs_from` of the chunk.
    logprob_targets: list[int] = field(default_factory=list)
    logprobs_from: int = 0
    num_candidates: int = 0  # if it yields candidates


class Yield(Enum):
    """What a row returns when its last known token has been computed."""

    TOKEN = 0  # the next token; a later step computes its KV
    HIDDEN_STATE = 1  # the hidden state of the last known token, after the final norm
    CANDIDATES = 2  # the most likely next tokens, of which the engine chooses one later
    NOTHING = 3  # only the log-probabilities of its targets were wanted


class BlockMove(NamedTuple):
    """A block whose content is copied to another, as in a copy-on-write."""

    source: int
    target: int


NO_TOKEN = -1  # in place of a token: there was none to sample
COMPLETE = -2  # in place of a token: the grammar of the row allows no more


@dataclass(slots=True)
class StepOutput:
    """What the rows of one step yielded."""

    # One for each row that yields a token, in plan order: a list, because there can be hundreds.
    # Or NO_TOKEN or COMPLETE.
    token_ids: list[int]
    # Row -> [E]
    hidden_states: dict[int, list[float]] = field(default_factory=dict)
    # Row -> (token id, log-probability), as many as its chunk says, the best first.
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    # Row -> log-probabilities of its sampled token, if it requests them.
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    # Row -> log-probabilities of each of the `logprob_targets` of its chunk.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    # Row -> what its logits processor or its grammar raised. Its token is NO_TOKEN.
    errors: dict[int, Exception] = field(default_factory=dict)


class Runner(Protocol):
    """What the engine needs from a runner. ModelRunner and the tests' fake runner implement it."""

    num_blocks: int  # KV blocks for requests; the null block is not counted
    is_async: bool  # whether the device works while the host plans the next step

    def run(self, plan: StepPlan) -> Callable[[], StepOutput]:
        """Launch one step. Returns a function that waits for the device and returns the output."""


# The sampler's filters in the order in which they apply, each with the value that turns it off.
# A new one needs a field of SamplingParams, an entry here and a function in models/sampler.py; on a
# GPU also `_threshold` and `_draw` in gpu/kernels/sampling.py.
FILTERS: dict[str, int | float] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(slots=True, frozen=True)
class RowSampling:
    """How the tokens of one row are sampled: the part of SamplingParams that the runner needs."""

    temperature: float  # 0 is greedy
    seed: int  # 64 bits; the random number is a function of (seed, position) alone
    filters: tuple[float, ...] = tuple(FILTERS.values())
    rules: LogitRules | None = None


@dataclass(frozen=True)  # without slots: the runner has weak references to it
class LogitRules:
    """Rules that change or report a row's logits, as in SamplingParams. Most rows have none."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids
    # None of `stops` is sampled before there are `min_tokens` output tokens.
    min_tokens: int = 0
    stops: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: tuple[Callable[..., Any], ...] = ()
    grammar: Any = None  # nanovllm.features.structured.Grammar

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)
