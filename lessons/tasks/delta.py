"""The delta rule: a token corrects the states of a layer of linear attention.

The task. Write `step`, which computes one token in H heads. Each head has a state S [Dk, Dv], and
of the token a query q, a key k, a value v and two numbers, g and beta:

    S <- e^g S,   d = beta (v - S^T k),   S <- S + k d^T,   o = S^T q

Example: a head has S = [[8], [12]], g = log 0.5 and beta = 1. It forgets half of S, which leaves
[[4], [6]]. For the key [0.6, 0.8] this S has the value 7.2. The token's value is [10], so d = [2.8]
and S becomes [[5.68], [8.24]]. For the query [1, 0] the output is [5.68].

What must stay true: the heads are independent. The arguments, also the states, stay as they are.

In the engine: decode in nanovllm/features/models/hybrid/delta_rule.py. Hint: x[..., None] adds an
axis, and torch.einsum names axes.
"""

from torch import Tensor


def step(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """states [H, Dk, Dv], q and k [H, Dk], v [H, Dv], g and beta [H] -> states, outputs [H, Dv]."""
    raise NotImplementedError("step is to be written; see the top of this file")
