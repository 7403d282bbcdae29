"""A scheduling policy: the request with the longest output first, aged.

The task. Write a policy that admits first the request that may generate the most tokens ("longest
processing time first", Graham 1969). Suppose that 2 sequences run at a time, and that five requests
may generate 40, 40, 40, 40 and 160 tokens. In the order of arrival everything takes 80 + 160 steps.
If the long one starts first, the short ones run next to it: 160 steps.

In a stream of requests, a short one must not wait forever. A request therefore counts as AGING =
16 tokens longer for each request that arrives after it. Example: requests 0, 1 and 2, in this
order of arrival, may generate 8, 40 and 24 tokens. Compared with request 2, request 0 counts as
8 + 2 * 16 = 40. Compared with request 1, it counts as 8 + 16 = 24. The order is 1, 0, 2.

What must stay true:
  - A request that arrives d requests later is admitted earlier only if it is more than 16 * d
    tokens longer. Equal requests are admitted in the order of arrival.
  - The key is an int, and it is a function of the sequence alone: it does not depend on which
    blocks are used or cached. The scheduler computes it once, when a request is queued, so it must
    not need what is unknown then. It changes nothing.

Where it goes. A policy is a key: the scheduler admits the waiting sequence with the smallest one.
See PolicyKey and POLICIES in nanovllm/engine/policies.py, and the two policies there.

Hints: nanovllm/engine/sequence.py has the fields of a sequence. The largest number of output
tokens follows from two of them. The key of one request cannot look at another request, so aging
must be a term of each key.
"""

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.policies import AGING  # noqa: F401
from nanovllm.engine.sequence import Sequence


def longest_output_first(seq: Sequence, blocks: BlockManager) -> int:
    """The key of `seq` in the waiting queue. The smallest key is admitted first."""
    raise NotImplementedError("longest_output_first is to be written; see the top of this file")
