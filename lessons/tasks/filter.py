"""A sampling filter: typical_p, which keeps the tokens of typical surprise.

The task. The surprise of a token with probability q is -log q. Its mean over the distribution is
the entropy H. Locally typical sampling (Meister et al. 2022, arXiv:2202.00666) orders the tokens
by |surprise - H|, the smallest first, and keeps the fewest tokens whose probabilities sum to p or
more.

Example: probabilities 0.5, 0.2, 0.2, 0.1 have the surprises 0.69, 1.61, 1.61, 2.30 and the entropy
1.22. The distances are 0.53, 0.39, 0.39, 1.08. For p = 0.3 the two tokens of 0.2 are kept, whose
sum is 0.4, and the most likely token is hidden.

What must stay true:
  - Tokens with the same distance as the last one that is kept are kept too.
  - At least one token is kept, whatever p is. p = 1 leaves the logits of a row as they are.
  - A kept token keeps its logit. A hidden one gets -inf, also if an earlier filter has hidden it.
  - Each row has its own p. The arguments stay as they are.

In the engine: FILTER_FUNCTIONS in nanovllm/models/sampler.py, where keep_top_p is similar. Hints:
0 * log 0 is NaN in torch, and Tensor.nansum leaves NaN out. In the sorted order, the last token
that is kept is the first one at which the sum of the probabilities reaches p. If rounding keeps
the sum below a p of almost 1, all are kept.
"""

from torch import Tensor


def keep_typical_p(logits: Tensor, typical_p: Tensor) -> Tensor:
    """Hide tokens of atypical surprise: logits [R, V], typical_p [R], both float32 -> [R, V]."""
    raise NotImplementedError("keep_typical_p is to be written; see the top of this file")
