"""Sequence: one stream of tokens being generated, as the control plane sees it.

Owns: its tokens and its progress. The scheduler and the block manager change it; the runner never
sees it. No torch here.

    token_ids:   [ prompt ............ | output ....... ]  + promised
                                                 ^             ^
                          num_computed <= num_tokens = len(token_ids) + tokens drawn, not yet read

A sequence has tokens that it knows and tokens whose KV is computed, and that is all the phase it
has: a step computes some of `num_tokens - num_computed`.
"""

from dataclasses import dataclass, field
from enum import Enum

from nanovllm.plan import RowSampling


class Status(Enum):
    NEW = 0  # not queued; a fork stays so until its parent has a token
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Sequence:
    request_id: str
    arrival: int  # 0, 1, 2, ... in order of add_request
    token_ids: list[int]  # prompt, then output; grows in Scheduler.commit
    num_prompt: int
    max_length: int  # prompt and output never exceed this
    stop_token_ids: frozenset[int]
    sampling: RowSampling
    index: int = 0  # among the samples of its request
    parent: "Sequence | None" = None  # the first sample, which computes the prompt for all
    forks: list["Sequence"] = field(
        default_factory=list
    )  # its other samples, until they are queued

    status: Status = Status.NEW
    num_tokens: int = 0  # known and promised
    num_computed: int = 0  # have their KV in the cache, once every plan made so far has run
    decoding: bool = False  # the runner's row holds the one token left to compute
    row: int = -1
    last_chunk: int = -1  # number of the plan that computed its last chunk
    preemptions: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the token id or the string that ended it, if one did

    # Kept by the block manager.
    block_table: list[int] = field(default_factory=list)
    shares_tail: bool = False  # the block that it writes next may be another's too: copy-on-write
    block_hashes: list[int] = field(default_factory=list)  # of its full blocks, chained
    num_published: int = 0  # of its blocks, how many others can find
    chain: int = 0  # identity of the last published block, the parent of the next

    @property
    def wants_prompt_logprobs(self) -> bool:
        rules = self.sampling.rules
        return rules is not None and rules.prompt_logprobs is not None

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]
