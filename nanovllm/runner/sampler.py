"""Draws the next tokens: temperature, then top-k, top-p, min-p (transformers' order), then a draw.

Owns: nothing. Given: logits and a SamplingBatch. Mutates: nothing.

The draw inverts the cumulative distribution at u, a number that is a function of (seed, position)
alone. So a seeded request that gets the same logits gets the same tokens in whatever batch it runs, and
no generator has a state to keep. Filters that no row asks for cost nothing; a mixed batch takes every path once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.runner.batch import SamplingBatch

NOTHING = float("-inf")
GROUP = 256  # tokens of a group, where a row is searched in two levels
CANDIDATES = 256  # likeliest tokens that top-p looks at first


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits [R, V] -> token ids [R] int64. Rows of temperature 0 take the maximum."""
    if batch.all_greedy:
        return largest(logits)
    is_greedy = batch.temperature == 0
    temperature = torch.where(is_greedy, 1.0, batch.temperature)[:, None]
    if batch.filters:
        logits, temperature = filtered(logits, temperature, batch), torch.ones_like(temperature)
    tokens = draw(logits, temperature, uniform(batch.seeds, batch.positions))
    if is_greedy.any():
        tokens[is_greedy] = largest(logits[is_greedy])
    return tokens


def filtered(logits: Tensor, temperature: Tensor, batch: SamplingBatch) -> Tensor:
    """logits [R, V], temperature [R, 1] -> logits at that temperature, less the largest, float32;
    hidden ones are minus infinity."""
    logits = logits.float()
    # Less the largest: a tiny temperature must not overflow.
    logits = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature)
    if batch.any_top_k:
        keep_top_k(logits, batch.top_k)
    if batch.any_top_p:
        keep_top_p(logits, batch.top_p)
    if batch.any_min_p:
        keep_min_p(logits, batch.min_p)
    return logits


def largest(logits: Tensor) -> Tensor:
    """[R, V] -> [R]: argmax, the first of equals. In two levels: torch's own is ten times slower."""
    group = groups(logits, Tensor.amax).argmax(dim=-1, keepdim=True)
    return (group * GROUP + members(logits, group, NOTHING).argmax(dim=-1, keepdim=True)).flatten()


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
    """Nucleus sampling (Holtzman et al. 2019): hide the tail beyond probability p. 1 keeps all.

    Sorts as many of the likeliest tokens as it takes to reach p. Of equals it keeps all or none.
    """
    rows = (top_p < 1).nonzero().flatten()  # only these are looked at
    probs, p, size = logits[rows].softmax(dim=-1), top_p[rows, None], CANDIDATES
    likeliest = probs.topk(min(size, probs.shape[1])).values
    while size < probs.shape[1] and (likeliest.sum(dim=-1, keepdim=True) < p).any():
        size *= 8
        likeliest = probs.topk(min(size, probs.shape[1])).values
    before = likeliest.cumsum(dim=-1) - likeliest  # probability of the likelier ones
    kept = (before < p).sum(dim=-1, keepdim=True).clamp(min=1)  # whatever p rounds to
    least = likeliest.gather(1, kept - 1)
    logits[rows] = logits[rows].masked_fill_(probs < least, NOTHING)


def keep_min_p(logits: Tensor, min_p: Tensor) -> None:
    """Hide tokens less likely than p times the likeliest (Nguyen et al. 2024). 0 keeps all."""
    floor = logits.amax(dim=-1) + min_p.log()
    logits.masked_fill_(logits < floor[:, None], NOTHING)


def draw(logits: Tensor, temperature: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulative probability passes u [R]; never a hidden one.

    logits [R, V], temperature [R, 1]. In two levels, a group of tokens and then one of the group: a
    float32 sum over the whole vocabulary would round rare tokens away, and one in double precision
    would take its time.
    """
    top = logits.amax(dim=-1, keepdim=True).float()
    sums = groups(weights(logits, top, temperature), Tensor.sum).double()
    cumulative = sums.cumsum(dim=-1)
    target = u[:, None] * cumulative[:, -1:]
    group = _passes(cumulative, target)
    before = cumulative.gather(1, group) - sums.gather(1, group)
    inside = weights(members(logits, group, NOTHING), top, temperature).double().cumsum(dim=-1)
    return (group * GROUP + _passes(inside, target - before)).flatten()


def weights(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """In float32, what probabilities are proportional to: 1 for the likeliest of a row."""
    return logits.to(torch.float32, copy=True).sub_(top).div_(temperature).exp_()


def groups(x: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """[R, V] -> [R, number of groups]: each group of a row reduced. The last one may be short."""
    whole = x.shape[1] // GROUP * GROUP
    reduced = reduce(x[:, :whole].unflatten(1, (-1, GROUP)), dim=-1)
    if whole == x.shape[1]:
        return reduced
    return torch.cat((reduced, reduce(x[:, whole:], dim=-1, keepdim=True)), dim=-1)


def members(x: Tensor, group: Tensor, beyond: float) -> Tensor:
    """The entries [R, GROUP] of one group [R, 1] of each row, filled up with `beyond`."""
    index = group * GROUP + torch.arange(GROUP, device=x.device)
    found = x.gather(1, index.clamp(max=x.shape[1] - 1))
    return found.masked_fill_(index >= x.shape[1], beyond)


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
