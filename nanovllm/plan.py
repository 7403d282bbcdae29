"""StepPlan: what one step does, in plain ints. The only thing that goes from scheduler to runner.

Owns: nothing; these are values. The scheduler fills them in, the runner reads them, neither changes
one afterwards. No torch here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

# (token id, log-probability, rank) of one place: the token that stands there, then likelier ones.
TokenLogprobs: TypeAlias = list[tuple[int, float, int]]


@dataclass(slots=True, frozen=True)
class LogitRules:
    """What few requests ask of their logits; a row without any has none of these."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids of each
    min_tokens: int = 0  # before so many output tokens, none of `stops` is drawn
    stops: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    processors: tuple[Callable[[list[int], Any], Any], ...] = ()

    @property
    def penalizes(self) -> bool:
        return (self.presence, self.frequency, self.repetition) != (0, 0, 1)


@dataclass(slots=True, frozen=True)
class RowSampling:
    """How one row's tokens are drawn; the part of SamplingParams that the sampler needs."""

    temperature: float  # 0 is greedy
    top_k: int  # 0 is off
    top_p: float  # 1 is off
    min_p: float  # 0 is off
    seed: int  # 64 bits; the noise is a function of (seed, position) alone
    rules: LogitRules | None = None


@dataclass(slots=True)
class Join:
    """A sequence takes a row: everything that the runner has to know of it from now on."""

    row: int
    block_table: list[int]  # blocks found or shared; all others come as StepPlan.new_blocks
    sampling: RowSampling
    # For rows with rules: the tokens known so far, which the rules look at.
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Chunk:
    """Known tokens of one row that this step computes: a prompt, a part of one, or a resumption."""

    row: int
    start: int  # position of token_ids[0]; everything before it has its KV in the cache
    token_ids: list[int]
    sample: bool  # true if this chunk reaches the row's last token, so that a new one is drawn
    # Where prompt log-probabilities are asked for: the prompt tokens that follow those of the chunk.
    targets: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """One step. Tokens are drawn for the chunks with `sample`, in order, then for `decode_rows`."""

    joins: list[Join] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # row, index, block
    # Copy the KV of these blocks, (from, to), before anything is computed: all reads before any write.
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    # Rows that compute the one token which the runner drew for them last. It may be known to the
    # runner alone: it never has to come back to the host to be computed.
    decode_rows: list[int] = field(default_factory=list)
    num_tokens: int = 0  # computed by this step, at most the token budget
