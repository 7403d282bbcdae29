"""A scheduling policy: the request with the longest output first, aged.

The task. Write a policy that admits first the request that may generate the most tokens ("longest
processing time first", Graham 1969). In a stream of requests a short one must not wait forever, so
a request counts as AGING = 16 tokens longer for each request that arrives after it.

Example: requests 0, 1 and 2, in this order of arrival, may generate 8, 40 and 24 tokens. Compared
with request 2, request 0 counts as 8 + 2 * 16 = 40. Compared with request 1, it counts as 8 + 16 =
24. The order is 1, 0, 2. A key cannot look at the other requests, so aging is a term of each key
that depends on seq.arrival: 0, 1, 2, ... in the order of arrival.

What must stay true:
  - A request that arrives d requests later overtakes only if it is more than 16 * d tokens longer.
  - The key is an int, computed once, when a request is queued. It depends on the sequence alone and
    not on the blocks, and it changes nothing.

In the engine: POLICIES in nanovllm/engine/policies.py. Hints: nanovllm/engine/sequence.py has the
fields of a sequence. The largest number of output tokens follows from two of them; seq.request is
None in the checks.
"""

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.policies import AGING  # noqa: F401
from nanovllm.engine.sequence import Sequence


def longest_output_first(seq: Sequence, blocks: BlockManager) -> int:
    """The key of `seq` in the waiting queue. The smallest key is admitted first."""
    raise NotImplementedError("longest_output_first is to be written; see the top of this file")
