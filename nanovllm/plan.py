"""StepPlan: what one step does, in plain ints. The only thing that goes from scheduler to runner.

Owns: nothing; these are values. The scheduler fills them in, the runner reads them, neither changes
one afterwards. No torch here.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class RowSampling:
    """How one row's tokens are drawn; the part of SamplingParams that the sampler needs."""

    temperature: float  # 0 is greedy
    top_k: int  # 0 is off
    top_p: float  # 1 is off
    min_p: float  # 0 is off
    seed: int  # 64 bits; the noise is a function of (seed, position) alone


@dataclass(slots=True)
class Join:
    """A sequence takes a row: everything that the runner has to know of it from now on."""

    row: int
    block_table: list[int]  # blocks found or shared; all others come as StepPlan.new_blocks
    sampling: RowSampling


@dataclass(slots=True)
class Chunk:
    """Known tokens of one row that this step computes: a prompt, a part of one, or a resumption."""

    row: int
    start: int  # position of token_ids[0]; everything before it has its KV in the cache
    token_ids: list[int]
    sample: bool  # true if this chunk reaches the row's last token, so that a new one is drawn


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
