"""The sampler in plain torch: temperature, then the filters, then one draw per row.

Filters and their order are transformers': top-k, top-p, min-p. The draw inverts the cumulative
distribution at u, a number that is a function of (seed, position) alone. Equal seeds and logits
give equal tokens in any batch, and there is no generator state to keep.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.models.batch import SamplingBatch

HIDDEN = float("-inf")  # the logit of a token that is never drawn


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits [R, V] -> token ids [R] int64. Rows of temperature 0 take the most likely token.

    Every sampler returns -1 for a row in which a logit is NaN or +inf, or all are -inf (hidden).
    """
    best, tokens = logits.max(dim=-1)
    if not batch.all_greedy:
        filtered = filtered_logits(logits, batch, FILTER_FUNCTIONS)
        drawn = draw(filtered, uniform(batch.seeds, batch.positions))
        tokens = torch.where(batch.temperature == 0, tokens, drawn)
    return torch.where(best.isfinite(), tokens, -1)  # the maximum with NaN is NaN


def draw(logits: Tensor, u: Tensor) -> Tensor:
    """The token [R] at which the cumulative probability of logits [R, V] exceeds u [R]."""
    probs = logits.softmax(dim=-1, dtype=torch.float64)
    # On a GPU, rounding can raise the sum at a token of probability 0, which must not be drawn.
    cumulative = probs.cumsum(dim=-1).masked_fill(probs == 0, 0)
    exceeds = cumulative > u[:, None] * cumulative.amax(dim=-1, keepdim=True)
    return exceeds.byte().argmax(dim=-1)  # the first


FilterFunction = Callable[[Tensor, Tensor], Tensor]


def filtered_logits(
    logits: Tensor, batch: SamplingBatch, functions: dict[str, FilterFunction]
) -> Tensor:
    """logits [R, V] -> float32 (logits - their maximum) / temperature, HIDDEN if filtered."""
    logits = logits.float()
    # The maximum is subtracted first, so that a tiny temperature does not overflow.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    # As in the kernels, which need a temperature whose reciprocal is finite in float32.
    logits = logits / batch.temperature.clamp(min=1.2e-38)[:, None]
    for name, values in batch.filters.items():
        logits = functions[name](logits, values)
    return logits


def keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Hide all but the k largest logits of each row. 0 keeps all."""
    most = int(top_k.max().clamp(1, logits.shape[1]))
    kth = logits.topk(most, dim=-1).values.gather(1, (top_k - 1).clamp(0, most - 1)[:, None])
    return logits.masked_fill((logits < kth) & (top_k > 0)[:, None], HIDDEN)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751): the most likely tokens that reach p.

    Keeps the fewest tokens that reach p and all as likely as the last of them; p = 1 keeps all.
    """
    probs = logits.softmax(dim=-1)
    ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(dim=-1) - ordered  # the probability of all more likely tokens
    kept = (before < top_p[:, None]).sum(dim=-1, keepdim=True).clamp(min=1)
    least = ordered.gather(1, kept - 1)
    return logits.masked_fill((probs < least) & (top_p < 1)[:, None], HIDDEN)


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Hide tokens less likely than p times the maximum (Nguyen et al. 2024, arXiv:2407.01082)."""
    threshold = logits.amax(dim=-1) + min_p.log()
    return logits.masked_fill(logits < threshold[:, None], HIDDEN)


FILTER_FUNCTIONS: dict[str, FilterFunction] = {
    "top_k": keep_top_k,
    "top_p": keep_top_p,
    "min_p": keep_min_p,
}


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """[R] float64 in [0, 1): 53 bits of SplitMix64 (Steele et al. 2014) of seed and position."""
    z = _mix(seeds + positions * _signed(0x9E3779B97F4A7C15))
    z = _mix(z + _signed(0x9E3779B97F4A7C15))
    return _shift(z, 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own operator keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
