"""Scheduling policies and the queue of waiting sequences: the order in which they are admitted."""

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush

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


class WaitingQueue:
    """Waiting sequences, sorted. Adding or removing one of n takes O(log n), amortized.

    It is a heap. A sequence that is removed stays there until it is the first, or until half of the
    heap has been removed.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int, int, int, Sequence]] = []
        self._entries: dict[Sequence, tuple[bool, int, int, int, Sequence]] = {}  # not removed

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences in their order, which takes O(n log n)."""
        return (entry[-1] for entry in sorted(self._entries.values()))

    @property
    def first(self) -> Sequence:
        while self._entries.get(self._heap[0][-1]) is not self._heap[0]:
            heappop(self._heap)
        return self._heap[0][-1]

    def add(self, seq: Sequence, key: int, at_head: bool) -> None:
        """Add a sequence before those with larger keys; `at_head` before all that are not there."""
        self._entries[seq] = entry = (not at_head, key, seq.arrival, seq.index, seq)
        heappush(self._heap, entry)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._entries

    def keep(self, seqs: Iterable[Sequence]) -> None:
        """Remove all but these, from whatever state a failure has left."""
        self._entries = {seq: self._entries[seq] for seq in seqs if seq in self._entries}
        self._heap = list(self._entries.values())
        heapify(self._heap)

    def remove(self, seq: Sequence) -> None:
        del self._entries[seq]
        if len(self._heap) > 2 * len(self._entries):
            self._heap = list(self._entries.values())
            heapify(self._heap)
