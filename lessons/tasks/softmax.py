"""Online softmax: attention in one pass over tiles of keys.

The task. Write `update`, which takes the scores and the values of one more tile, and `merge`, which
joins what two programs have computed on different tiles. A state is (m, l, acc): the largest score
so far, the sum of exp(score - m), the sum of exp(score - m) * value. acc / l is the result.

Example: scores 1 and 2 in one tile with the values 10 and 20, then the score 3 with the value 30.
The first tile gives m = 2, l = e^-1 + 1 = 1.368, acc = 10 e^-1 + 20 = 23.68. The second raises m by
1: l = 1.368 e^-1 + 1 = 1.503, acc = 23.68 e^-1 + 30 = 38.71. The result is 38.71 / 1.503 = 25.75.

What must stay true:
  - Scores of 30,000 and of -30,000 give no infinity and no NaN. The arguments stay as they are.
  - All tensors are float32, or all float64, which needs the sums to 1e-10.
  - A score of -inf has no weight, and all scores of a tile may be -inf. The first state has
    m = -inf, l = 0 and acc = 0. All values are finite.

In the engine: _attend_tile and _merge_splits in nanovllm/backends/gpu/kernels/attention.py. Hints:
what was summed with the old m is multiplied by exp(old m - new m). -inf - -inf is NaN, so subtract
0 in place of a maximum of -inf.
"""

from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]  # m [], l [], acc [D]


def update(state: State, scores: Tensor, values: Tensor) -> State:
    """scores [n], values [n, D] of one tile; n is at least 1."""
    raise NotImplementedError("update is to be written; see the top of this file")


def merge(one: State, other: State) -> State:
    raise NotImplementedError("merge is to be written; see the top of this file")
