"""The seam between the engine and the runner, without torch: plain ints in both directions.

The scheduler makes a `StepPlan`; the runner executes it and returns a `StepOutput`. In vLLM they
are `SchedulerOutput` and `ModelRunnerOutput`. A plan is not changed once the scheduler returns it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

# (token id, log-probability, rank) at one position: the token itself, then the most likely ones.
TokenLogprobs: TypeAlias = list[tuple[int, float, int]]

# The sampler's filters in the order in which they apply, each with the value that turns it off.
# A new one needs a field of SamplingParams, an entry here and a function in models/sampler.py; on a
# GPU also `_threshold` and `sample` in gpu/kernels/sampling.py.
FILTERS: dict[str, int | float] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(slots=True, frozen=True)
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

    @property
    def has_penalties(self) -> bool:
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0, 0, 1)


@dataclass(slots=True, frozen=True)
class RowSampling:
    """How the tokens of one row are sampled: the part of SamplingParams that the runner needs."""

    temperature: float  # 0 is greedy
    seed: int  # 64 bits; the random number is a function of (seed, position) alone
    filters: tuple[float, ...] = tuple(FILTERS.values())
    rules: LogitRules | None = None


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
    sample: bool  # whether it ends with the row's last known token, so that the next is sampled
    # The prompt tokens that follow each token of the chunk, if prompt_logprobs are requested.
    logprob_targets: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """One step. One token is sampled for each chunk with `sample`, then for each decode row."""

    joins: list[Join] = field(default_factory=list)
    # (row, index in the block table, block) for rows that joined in an earlier step.
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    # (source, target): copied before anything is computed, and every read precedes every write.
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    # Rows that compute the token that was sampled for them last. Only the runner may know it yet,
    # because a sampled token need not return to the host before it is computed.
    decode_rows: list[int] = field(default_factory=list)
    num_tokens: int = 0  # computed by this step; at most the token budget


@dataclass(slots=True)
class StepOutput:
    """What one step sampled."""

    token_ids: list[int]  # in plan order
    # Index among the sampled tokens -> its log-probabilities, for the rows that request them.
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    # Index of the chunk -> the log-probabilities of each of its `logprob_targets`.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    # Index among the sampled tokens -> what a logits processor raised. The token is -1.
    errors: dict[int, Exception] = field(default_factory=dict)


class Runner(Protocol):
    """What the engine needs from a runner. ModelRunner and the tests' fake runner implement it."""

    num_blocks: int  # KV blocks for requests; the null block is not counted
    is_async: bool  # whether the device works while the host plans the next step

    def run(self, plan: StepPlan) -> Callable[[], StepOutput]:
        """Launch one step. Returns a function that waits for the device and returns the output."""
