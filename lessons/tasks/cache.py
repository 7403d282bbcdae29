"""A KV cache: attention that computes each token once.

The task. Write `KVCache`. `attend` stores the keys and values of n new tokens behind those that the
cache holds, and returns the attention of the n queries. There are H query heads and K KV heads of D
numbers. In a head, the attention of a query q [D] to L tokens with the keys [L, D] and the values
[L, D] is softmax(keys q / sqrt(D)) values. A query attends to the stored tokens, to the new tokens
before its own, and to its own.

Example: if the cache holds 3 tokens and 2 are new, query 0 attends to 4 tokens and query 1 to 5.

What must stay true:
  - The tokens may come in any number of calls, one or more in each: the results are the same as in
    one call with all of them. No call changes an earlier result.
  - A group of H / K query heads shares a KV head: query head h reads KV head h // (H // K).
  - `attend` does not change q, k and v. The caller may overwrite them after the call,
    which changes no result.

In the engine: PlainAttention in nanovllm/models/attention.py. Hints: torch.cat grows a tensor.
Tensor.repeat_interleave repeats KV heads. exp(-inf) is 0.
"""

from torch import Tensor


class KVCache:
    """The keys and values of one sequence in one layer."""

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        raise NotImplementedError("__init__ is to be written; see the top of this file")

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, H, D], k and v [n, K, D] of n new tokens -> [n, H, D], all float32."""
        raise NotImplementedError("attend is to be written; see the top of this file")
