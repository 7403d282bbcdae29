"""Draws the next tokens: temperature, then top-k, top-p, min-p (transformers' order), then a draw.

Owns: nothing. Given: logits and a SamplingBatch. Mutates: the logits.

The draw inverts the cumulative distribution at u, a number that is a function of (seed, position)
alone. So a seeded request that gets the same logits gets the same tokens in whatever batch it runs, and
no generator has a state to keep. Filters that no row asks for cost nothing; a mixed batch takes every path once.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.runner.batch import SamplingBatch

NOTHING = float("-inf")
GROUP = 256  # tokens summed at a time in a draw


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits [R, V] float32 -> token ids [R] int64. Rows of temperature 0 take the maximum."""
    greedy = logits.argmax(dim=-1)
    if batch.all_greedy:
        return greedy
    is_greedy = batch.temperature == 0
    logits.sub_(logits.amax(dim=-1, keepdim=True))  # a tiny temperature must not overflow
    logits.div_(torch.where(is_greedy, 1.0, batch.temperature)[:, None])
    if batch.any_top_k:
        keep_top_k(logits, batch.top_k)
    if batch.any_top_p:
        keep_top_p(logits, batch.top_p)
    if batch.any_min_p:
        keep_min_p(logits, batch.min_p)
    return torch.where(is_greedy, greedy, draw(logits, uniform(batch.seeds, batch.positions)))


def keep_top_k(logits: Tensor, top_k: Tensor) -> None:
    """Hide all but the k largest of each row; 0 keeps all."""
    most = int(top_k.max().clamp(max=logits.shape[1]))
    if most == 0:
        return
    k = torch.where(top_k == 0, logits.shape[1], top_k.clamp(max=logits.shape[1]))
    largest = logits.topk(most, dim=-1).values
    kth = largest.gather(1, (k - 1).clamp(max=largest.shape[1] - 1)[:, None])
    logits.masked_fill_((logits < kth) & (top_k > 0)[:, None], NOTHING)


def keep_top_p(logits: Tensor, top_p: Tensor) -> None:
    """Nucleus sampling (Holtzman et al. 2019): hide the tail beyond probability p. 1 keeps all."""
    rows = (top_p < 1).nonzero().flatten()  # only these are sorted
    descending, order = logits[rows].sort(dim=-1, descending=True)
    probs = descending.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # probability of the likelier ones: 0 for the first
    hidden = torch.where(before < top_p[rows, None], descending, NOTHING)
    hidden[:, 0] = descending[:, 0]  # whatever p rounds to
    logits[rows] = torch.empty_like(hidden).scatter_(1, order, hidden)


def keep_min_p(logits: Tensor, min_p: Tensor) -> None:
    """Hide tokens less likely than p times the likeliest (Nguyen et al. 2024). 0 keeps all."""
    floor = logits.amax(dim=-1) + min_p.log()
    logits.masked_fill_(logits < floor[:, None], NOTHING)


def draw(logits: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulative probability passes u [R]; never a hidden one.

    In two levels, a group of tokens and then one of the group: a float32 sum over the whole
    vocabulary would round rare tokens away.
    """
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()  # [R, V]
    weights = F.pad(weights, (0, -weights.shape[1] % GROUP)).unflatten(
        1, (-1, GROUP)
    )  # [R, G, GROUP]
    groups = weights.double().sum(dim=-1).cumsum(dim=-1)  # [R, G]
    target = u[:, None] * groups[:, -1:]
    group = _passes(groups, target)
    before = (groups.gather(1, group) - weights.double().sum(dim=-1).gather(1, group)).clamp(min=0)
    row = torch.arange(len(u), device=u.device)
    inside = weights[row, group.flatten()].double().cumsum(dim=-1)  # [R, GROUP]
    return (group * GROUP + _passes(inside, target - before)).flatten()


def _passes(cumulative: Tensor, target: Tensor) -> Tensor:
    """[R, 1]: the first entry of each row that is more than its target, and no entry of width 0."""
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True)  # where the total is reached
    return torch.searchsorted(cumulative, target, right=True).minimum(last)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """[R] numbers in [0, 1): splitmix64 (Steele et al. 2014) of seed and position, 53 bits of it."""
    z = _mix(seeds + positions * _signed(0x9E3779B97F4A7C15))
    z = _mix(z + _signed(0x9E3779B97F4A7C15))
    return _shift(z, 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
