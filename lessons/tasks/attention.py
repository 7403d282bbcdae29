"""Attention over a whole text: each token reads the tokens up to it.

The task. Write `attention` for T tokens, H query heads and K KV heads of D numbers. In a head, the
result of a token with the query q is softmax(keys q / sqrt(D)) values, over the keys and values of
the tokens up to it, its own included. Query head h reads KV head h // (H // K).

Example: the first token attends to itself alone, so its result in head h is v[0, h // (H // K)].

What must stay true: tokens that follow change no result of a token. The arguments stay as they are.

In the engine: SelfAttention in nanovllm/models/qwen3.py. Hints: a loop over the heads is enough.
exp(-inf) is 0, and torch.ones(T, T).triu(1) has a 1 where a token would read a later one.
"""

from torch import Tensor


def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, H, D], k and v [T, K, D], float32 -> [T, H, D]. The number of the layer is not used."""
    raise NotImplementedError("attention is to be written; see the top of this file")
