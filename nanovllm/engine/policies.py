"""Scheduling policies and the waiting queue: the order in which sequences are admitted."""

import itertools
import sys
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import TypeAlias

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

# The waiting sequence with the smallest key is admitted first.
PolicyKey = Callable[[Sequence, BlockManager], int]
HEAD = -sys.maxsize  # the key of preempted sequences and forks, smaller than every policy's
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


# Key, arrival, index among the samples, unique number, sequence. The smallest entry is first.
Entry: TypeAlias = tuple[int, int, int, int, Sequence]


class WaitingQueue:
    """Waiting sequences, sorted. Adding or removing one of n takes O(log n), amortized.

    An entry that is removed stays in the heap until it is the first, or until half of all entries
    are removed. The number of an entry tells whether its sequence has been removed, or added again.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._num_waiting = 0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences in their order. Takes O(n log n)."""
        return (entry[-1] for entry in sorted(self._waiting()))

    def _waiting(self) -> list[Entry]:
        """Return the entries that were not removed, in any order."""
        return [entry for entry in self._heap if is_waiting(entry)]

    @property
    def first(self) -> Sequence:
        """The sequence to admit next. There must be one."""
        while not is_waiting(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][-1]

    def add(self, seq: Sequence, key: int) -> None:
        """Add a sequence before all sequences with larger keys."""
        seq.queue_number = next(self._numbers)
        heappush(self._heap, (key, seq.arrival, seq.index, seq.queue_number, seq))
        self._num_waiting += 1

    def remove(self, seq: Sequence) -> None:
        seq.queue_number = -1
        self._num_waiting -= 1
        if len(self._heap) > 2 * self._num_waiting:
            self._heap = sorted(self._waiting())


def is_waiting(entry: Entry) -> bool:
    """Return whether the entry was not removed."""
    return entry[-1].queue_number == entry[-2]
