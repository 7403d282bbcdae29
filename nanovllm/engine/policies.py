"""Scheduling policies: the order in which waiting sequences are admitted."""

from collections.abc import Callable

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

# The waiting sequence with the smallest key is admitted first.
PolicyKey = Callable[[Sequence, BlockManager], int]
# Under "sjf" one position in the order of arrival is worth this many tokens.
AGING = 16


def first_come_first_served(seq: Sequence, blocks: BlockManager) -> int:
    return seq.arrival


def shortest_job_first(seq: Sequence, blocks: BlockManager) -> int:
    """Uncached prompt tokens, aged by arrival. The key is fixed when the request is queued.

    A request that arrives `d` requests later overtakes this one only if AGING * d is less than this
    one's uncached tokens, so at most uncached / AGING requests do.
    """
    uncached = seq.num_prompt - len(blocks.match(seq)) * blocks.block_size
    return uncached + AGING * seq.arrival


POLICIES: dict[str, PolicyKey] = {"fcfs": first_come_first_served, "sjf": shortest_job_first}
