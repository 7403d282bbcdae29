"""Scheduling policies and the waiting queue: the order in which sequences are admitted."""

import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from operator import attrgetter

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

# The waiting sequence with the smallest key is admitted first.
PolicyKey = Callable[[Sequence, BlockManager], int]
HEAD = -sys.maxsize  # the key of preempted sequences and forks, smaller than every policy's
QUEUE_KEY = attrgetter("queue_key")
AGING = 16  # with "sjf", each position in the order of arrival counts as this many tokens


def first_come_first_served(seq: Sequence, blocks: BlockManager) -> int:
    return seq.arrival


def shortest_job_first(seq: Sequence, blocks: BlockManager) -> int:
    """Return the number of uncached prompt tokens at arrival, plus AGING for each earlier request.

    A request that arrives `d` requests later overtakes this one only if AGING * d is less than the
    number of uncached tokens of this one. At most `uncached` / AGING requests can overtake it.
    """
    uncached = seq.num_prompt - len(blocks.match(seq)) * blocks.block_size
    return uncached + AGING * seq.arrival


POLICIES: dict[str, PolicyKey] = {"fcfs": first_come_first_served, "sjf": shortest_job_first}


class WaitingQueue(deque[Sequence]):
    """Waiting sequences, sorted by policy key and then by arrival. The first is admitted first.

    Removing the first takes constant time. Adding or removing another one of n moves up to n / 2
    pointers.
    """

    def add(self, seq: Sequence, key: int) -> None:
        """Add a sequence behind all sequences with smaller keys."""
        seq.queue_key = (key, seq.arrival, seq.index)
        insort(self, seq, key=QUEUE_KEY)

    def remove(self, seq: Sequence) -> None:
        if seq is self[0]:
            self.popleft()
            return
        i = bisect_left(self, seq.queue_key, key=QUEUE_KEY)
        while self[i] is not seq:
            i += 1
        del self[i]
