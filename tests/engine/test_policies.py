"""The waiting queue."""

import random

from nanovllm.engine.policies import HEAD, WaitingQueue
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import RowSampling


def test_waiting_queue_is_sorted() -> None:
    """Sequences come and go in any order. Some have equal keys, as beams may."""
    rng, queue = random.Random(0), WaitingQueue()
    seqs = [Sequence(str(i), i // 2, [i], 1, 2, frozenset(), RowSampling(0, 0)) for i in range(200)]
    for _ in range(5000):
        seq = rng.choice(seqs)
        if seq in queue:
            if rng.random() < 0.5:
                seq = queue[0]
            queue.remove(seq)
            assert seq not in queue
        else:
            queue.add(seq, HEAD if rng.random() < 0.2 else rng.randrange(50))
            assert seq in queue
        keys = [seq.queue_key for seq in queue]
        assert keys == sorted(keys)
