"""Sequence: one stream of tokens being generated, in the control plane.

The scheduler and the block manager change it. It is never passed to the runner.

    token_ids     [ prompt ............ | output ....... ]   known tokens
    placeholders                                          [ ] [ ]
    num_computed  -------------------------------------->

A placeholder stands for a token of a step in flight, whose id the engine does not know yet. A token
counts as computed if its KV is in the cache after all plans made so far. There is no prefill state.
`decoding` only says where the next token to compute is stored: in the runner's row if it is true,
else in `token_ids`. A placeholder is stored only in the row.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nanovllm.plan import ResultKind, RowSampling

GREEDY = RowSampling()


class Status(Enum):
    UNQUEUED = 0  # a fork before its parent has a token, or a beam; see `awaits_token`
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Sequence:
    request_id: str
    arrival: int  # 0, 1, 2, ... in the order in which requests are queued
    token_ids: list[int]  # prompt, then output; Scheduler.commit appends to it
    num_prompt: int
    max_length: int  # of prompt and output together
    stop_token_ids: frozenset[int] = frozenset()
    sampling: RowSampling = GREEDY
    request: Any = None  # the Request that it belongs to; None after the request has ended

    status: Status = Status.UNQUEUED
    num_computed: int = 0  # tokens whose KV is in the cache after all plans made so far
    num_output_placeholders: int = 0  # tokens that are sampled by steps in flight
    decoding: bool = False  # whether the last token sampled by its row is its only uncomputed token
    row: int = -1
    known_to_runner: bool = False  # whether a plan has contained its NewRow
    queue_key: tuple[int, int, int] = (0, 0, 0)  # its place in the waiting queue
    preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at its first admission
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the token id or string that ended it, if any

    # Maintained by the block manager.
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of its first full blocks
    num_cached_blocks: int = 0  # full blocks whose content is cached, possibly in another block

    # ---- optional features ----

    result_kind: ResultKind = ResultKind.TOKEN

    # Several samples of one prompt, and beams.
    index: int = 0  # number among the samples of its request
    parent: "Sequence | None" = None  # the first sample, or the beam, from which it is forked
    forks: list["Sequence"] = field(default_factory=list)  # not queued yet
    # Whether its next token may be written to a shared or cached block.
    needs_copy_on_write: bool = False

    lookup: Any = None  # its n-grams, from which features/sampling/ngram.py makes drafts

    # Beams.
    num_candidates: int = 0  # number of candidates, if `result_kind` is CANDIDATES
    # Whether it has yielded a result, such as candidates, and its next token has not been chosen
    # yet. If it is preempted in this state, it is UNQUEUED until that token is appended.
    awaits_token: bool = False

    # Log-probabilities of given tokens.
    targets: list[int] = field(default_factory=list)
    first_target: int = 1  # position of the first target
    num_logprobs: int = 0  # how many of the most likely tokens to report with each target

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    def leave_row(self) -> None:
        """Reset the fields that describe its row."""
        self.row = -1
        self.decoding = False
        self.lookup = None
