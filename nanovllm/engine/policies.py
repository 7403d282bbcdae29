"""Scheduling policies and the waiting queue: the order in which sequences are admitted."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import TypeAlias

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

# The waiting sequence with the smallest key is admitted first.
PolicyKey = Callable[[Sequence, BlockManager], int]
# With "sjf", one position in the order of arrival counts as this many tokens.
AGING = 16


def first_come_first_served(seq: Sequence, blocks: BlockManager) -> int:
    return seq.arrival


def shortest_job_first(seq: Sequence, blocks: BlockManager) -> int:
    """Return the number of uncached prompt tokens at arrival, aged by the order of arrival.

    A request that arrives `d` requests later overtakes this one only if AGING * d is less than the
    uncached tokens of this one, so at most uncached / AGING requests overtake it.
    """
    uncached = seq.num_prompt - len(blocks.match(seq)) * blocks.block_size
    return uncached + AGING * seq.arrival


POLICIES: dict[str, PolicyKey] = {"fcfs": first_come_first_served, "sjf": shortest_job_first}


# Not at the head, key, arrival, index among the samples, unique number. The smallest is first.
Entry: TypeAlias = tuple[bool, int, int, int, int, Sequence]


class WaitingQueue:
    """Waiting sequences, sorted. Adding or removing one of n takes O(log n), amortized.

    Entries that are added in order, as with "fcfs", are in a deque, and the others in a heap. An
    entry that is removed stays there until it is the first, or until half of all are removed. The
    number of an entry tells whether its sequence has been removed, or added again.
    """

    def __init__(self) -> None:
        self._in_order: deque[Entry] = deque()
        self._heap: list[Entry] = []
        self._num_waiting = 0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences in their order, which takes O(n log n)."""
        return (entry[-1] for entry in sorted(self._waiting()))

    def _waiting(self) -> list[Entry]:
        """Return the entries that were not removed."""
        entries = itertools.chain(self._in_order, self._heap)
        return [entry for entry in entries if is_waiting(entry)]

    @property
    def first(self) -> Sequence:
        in_order, heap = self._in_order, self._heap
        while in_order and not is_waiting(in_order[0]):
            in_order.popleft()
        while heap and not is_waiting(heap[0]):
            heappop(heap)
        if not heap or (in_order and in_order[0] < heap[0]):
            return in_order[0][-1]
        return heap[0][-1]

    def add(self, seq: Sequence, key: int, at_head: bool) -> None:
        """Add a sequence before those with larger keys; `at_head` before all that are not there."""
        entry = (not at_head, key, seq.arrival, seq.index, next(self._numbers), seq)
        if not self._in_order or self._in_order[-1] < entry:
            self._in_order.append(entry)
        else:
            heappush(self._heap, entry)
        seq.queue_number = entry[-2]
        self._num_waiting += 1

    def __contains__(self, seq: Sequence) -> bool:
        return seq.queue_number >= 0

    def remove(self, seq: Sequence) -> None:
        seq.queue_number = -1
        self._num_waiting -= 1
        if len(self._in_order) + len(self._heap) > 2 * self._num_waiting:
            self._set(self._waiting())

    def keep(self, seqs: Iterable[Sequence]) -> None:
        """Remove all but these, from whatever state a failure has left."""
        waiting, kept = self._waiting(), set(seqs)
        for entry in waiting:
            if entry[-1] not in kept:
                entry[-1].queue_number = -1
        self._set(self._waiting())

    def _set(self, entries: list[Entry]) -> None:
        self._in_order, self._heap = deque(sorted(entries)), []
        self._num_waiting = len(entries)


def is_waiting(entry: Entry) -> bool:
    """Whether the entry was not removed."""
    return entry[-1].queue_number == entry[-2]
