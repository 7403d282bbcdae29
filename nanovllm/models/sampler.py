"""The sampler in plain torch: temperature, then the filters, then one draw per row.

The filters and their order are the same as in transformers: top-k, top-p, min-p. The draw inverts
the cumulative distribution at a number u that depends only on (seed, position). Equal seeds and
logits give equal tokens in any batch, and no generator state is needed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.models.batch import SamplingBatch

MASKED = float("-inf")  # the logit of a token that is never drawn


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample token ids [R] int64 from logits [R, V]. At temperature 0, take the largest logit.

    Every sampler returns -1 for a row with a NaN or +inf logit, or with only -inf logits (masked).
    """
    best, tokens = logits.max(dim=-1)
    if not batch.all_greedy:
        drawn = draw(filtered_logits(logits, batch), uniform(batch.seeds, batch.positions))
        tokens = torch.where(batch.temperature == 0, tokens, drawn)
    return torch.where(best.isfinite(), tokens, -1)  # a maximum with NaN is NaN


def draw(logits: Tensor, u: Tensor) -> Tensor:
    """Return the first token of each row of logits [R, V] with cumulative probability > u [R]."""
    probs = logits.softmax(dim=-1, dtype=torch.float64)
    # On a GPU, rounding can raise the sum at a token of probability 0, which must not be drawn.
    cumulative = probs.cumsum(dim=-1).masked_fill(probs == 0, 0)
    exceeds = cumulative > u[:, None] * cumulative.amax(dim=-1, keepdim=True)
    return exceeds.byte().argmax(dim=-1)  # the first True


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Hash (seed, position) to [R] float64 in [0, 1), by SplitMix64 (Steele et al. 2014)."""
    z = _mix(seeds + positions * _signed(0x9E3779B97F4A7C15))
    z = _mix(z + _signed(0x9E3779B97F4A7C15))
    return _shift(z, 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros. torch's operator repeats the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def filtered_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return (logits - maximum) / temperature [R, V] float32, MASKED for filtered tokens."""
    logits = logits.float()
    # The maximum is subtracted first, because dividing it by a tiny temperature can overflow.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    # The kernels clamp too, because they need a finite float32 reciprocal of the temperature.
    logits = logits / batch.temperature.clamp(min=1.2e-38)[:, None]
    for name, values in batch.filters.items():
        logits = FILTER_FUNCTIONS[name](logits, values)
    return logits


def keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Mask all but the k largest logits of each row. k = 0 keeps all."""
    max_k = int(top_k.max().clamp(1, logits.shape[1]))
    kth = logits.topk(max_k, dim=-1).values.gather(1, (top_k - 1).clamp(0, max_k - 1)[:, None])
    return logits.masked_fill((logits < kth) & (top_k > 0)[:, None], MASKED)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Mask all but the fewest tokens whose probabilities sum to p or more. p = 1 keeps all.

    Tokens as likely as the least likely of these are kept too. This is nucleus sampling (Holtzman
    et al. 2019, arXiv:1904.09751).
    """
    probs = logits.softmax(dim=-1)
    ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(dim=-1) - ordered  # the total probability of more likely tokens
    num_kept = (before < top_p[:, None]).sum(dim=-1, keepdim=True).clamp(min=1)
    threshold = ordered.gather(1, num_kept - 1)
    return logits.masked_fill((probs < threshold) & (top_p < 1)[:, None], MASKED)


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Mask tokens less likely than p times the maximum (Nguyen et al. 2024, arXiv:2407.01082)."""
    threshold = logits.amax(dim=-1) + min_p.log()
    return logits.masked_fill(logits < threshold[:, None], MASKED)


FILTER_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "top_k": keep_top_k,
    "top_p": keep_top_p,
    "min_p": keep_min_p,
}
