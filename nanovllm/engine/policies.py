"""Scheduling policies: the order in which sequences are admitted."""

import sys
from collections.abc import Callable

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

# The waiting sequence with the smallest key is admitted first.
PolicyKey = Callable[[Sequence, BlockManager], int]
FIRST = -sys.maxsize  # the key of preempted sequences and forks, smaller than every policy's
AGING = 16  # with "sjf", each position in the order of arrival counts as this many tokens


def first_come_first_served(seq: Sequence, _: BlockManager) -> int:
    """Return the position in the order of arrival."""
    return seq.arrival


def shortest_job_first(seq: Sequence, blocks: BlockManager) -> int:
    """Return the number of uncached prompt tokens at arrival, plus AGING for each earlier request.

    A request that arrives `d` requests later overtakes this one only if AGING * d is less than the
    number of uncached tokens of this one. At most `uncached` / AGING requests can overtake it.
    """
    uncached = seq.num_prompt - len(blocks.match(seq)) * blocks.block_size
    return uncached + AGING * seq.arrival


POLICIES: dict[str, PolicyKey] = {"fcfs": first_come_first_served, "sjf": shortest_job_first}
