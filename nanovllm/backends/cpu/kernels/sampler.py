"""The sampler on a CPU: filters, draws and log-probabilities.

The reference is models/sampler.py: it has the same filters and the same random numbers. A row of
logits is read once, in groups of tokens whose maxima are kept. A token is drawn by its weight
e^((logit - maximum) / temperature): first the group, by the sums of weights, then the token. With
top-k only few tokens are candidates: at least k tokens reach the k-th largest of the maxima, so
smaller logits cannot be among the k largest.
"""

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.parallel import run
from nanovllm.backends.cpu.kernels.primitives import BFLOAT16, array, exp, maximum, to_float32
from nanovllm.models import sampler
from nanovllm.models.batch import SamplingBatch
from nanovllm.plan import FILTERS

f32 = np.float32
INFINITY = f32(np.inf)
# The filters of `sample`, in its order. With any other, models/sampler.py samples the tokens.
IN_KERNEL = ("top_k", "top_p", "min_p")
GROUP = 256  # tokens
# The lowest temperature used: its reciprocal is finite.
MIN_TEMPERATURE = f32(1.2e-38)
# Less than any weight of a token that can be drawn, e^-87 or more.
MIN_WEIGHT = f32(1e-38)
# The places of floats in their order, from minus infinity to infinity; 0.0 has place 0.
LOWEST, HIGHEST = -0x7F800001, 0x7F800000
# `_logprobs_of_rows` takes the most likely tokens one by one, which is slow for more of them.
MAX_LOGPROBS = 1000


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return token ids [R] int64 for logits [R, V] in float32 or bfloat16."""
    values = batch.filters
    if not values.keys() <= set(IN_KERNEL):
        return sampler.sample(logits, batch)
    logits = logits.contiguous()
    rows, size = logits.shape
    filters = np.empty((len(IN_KERNEL), rows), np.float32)
    for i, name in enumerate(IN_KERNEL):
        filters[i] = values[name].numpy() if name in values else FILTERS[name]
    tokens = np.empty(rows, np.int64)
    source = logits.data_ptr(), logits.dtype is torch.bfloat16, size
    numbers = batch.temperature.numpy(), batch.seeds.numpy(), batch.positions.numpy()
    run(draw_rows, (*source, *numbers, filters, tokens), rows, rows * size)
    return torch.from_numpy(tokens)


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Compute models.sampler.token_logprobs, reading each row once."""
    if k > MAX_LOGPROBS:
        return sampler.token_logprobs(logits, tokens, k)
    logits = logits.contiguous()
    packed = np.empty((len(logits), 2 + 2 * k))
    source = logits.data_ptr(), logits.dtype is torch.bfloat16, logits.shape[1]
    run(_logprobs_of_rows, (*source, tokens.numpy(), packed), len(logits), logits.numel())
    return torch.from_numpy(packed)


@compiled()
def load_maxima(address, is_bf16, start, size, maxima, first, stop):
    """Set maxima [groups] of the groups [first, stop) of a row, which begins at `start`."""
    full = array(address + 4 * start, (size,), f32(0))
    half = array(address + 2 * start, (size,), BFLOAT16)
    for group in range(first, stop):
        part = slice(group * GROUP, min((group + 1) * GROUP, size))
        # LLVM vectorizes loops over whole arrays, such as these slices: 30 times as fast.
        maxima[group] = maximum(half[part]) if is_bf16 else maximum(full[part])


@compiled()
def _load(address, is_bf16, start, values, maxima):
    """Set values [V] to the logits of a row in float32, and maxima [groups]. Return the maximum.

    The row begins at `start`. If it has a NaN, the maximum is infinity.
    """
    if is_bf16:
        half = array(address + 2 * start, (len(values),), BFLOAT16)
        for i in range(len(values)):
            values[i] = to_float32(half[i])
    else:
        values[:] = array(address + 4 * start, (len(values),), f32(0))
    load_maxima(address, is_bf16, start, len(values), maxima, 0, len(maxima))
    return maximum(maxima)


@compiled()
def most_likely(address, is_bf16, start, size, maxima):
    """Return the first token with the maximum of a row, or -1 if the maximum is not finite."""
    first = np.argmax(maxima) * GROUP
    part = np.empty(min(GROUP, size - first), f32)
    top = _load(address, is_bf16, start + first, part, np.empty(1, f32))
    return first + np.argmax(part) if -INFINITY < top < INFINITY else -1


@compiled()
def _first_largest(values, maxima):
    """Return the index of the first of the largest values, and its group."""
    group = np.argmax(maxima)
    return group * GROUP + np.argmax(values[group * GROUP : (group + 1) * GROUP]), group


@compiled()
def _uniform(seed, position):
    """Return a number in [0, 1): SplitMix64 (Steele et al. 2014), as in the plain sampler."""
    gamma = np.uint64(0x9E3779B97F4A7C15)
    z = np.uint64(seed) + np.uint64(position) * gamma
    for step in range(2):
        z += np.uint64(step) * gamma
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * 2.0**-53


@compiled()
def _weight(power):
    """Return e^power, or 0 below e^-87."""
    return exp(power) if power > f32(-87) else f32(0)


@compiled()
def _exp_weights(logits, top, temperature, weights):
    """Set weights to e^((logits - top) / temperature), or 0 below e^-87. Return their sum."""
    total = f32(0)
    for i in range(len(logits)):
        weight = _weight((logits[i] - top) / temperature)
        weights[i] = weight
        total += weight
    return total


@compiled()
def _sum_from(weights, smallest):
    """Return the sum of the weights that are at least `smallest`."""
    total = f32(0)
    for i in range(len(weights)):
        total += weights[i] if weights[i] >= smallest else f32(0)
    return total


@compiled()
def _search_cumsum(weights, smallest, target):
    """Return (index, sum before it) of the first weight at which their sum exceeds `target`.

    Weights below `smallest`, which is positive, do not count. If the sum of all others does not
    exceed `target`, the result is the last of them.
    """
    index, before, total = 0, 0.0, 0.0
    for i in range(len(weights)):
        if weights[i] >= smallest:
            index, before = i, total
            total += weights[i]
            if total > target:
                break
    return index, before


@compiled()
def _float_at(place):
    """Return the float at a place in the order of floats, or infinity beyond its place."""
    place = min(place, HIGHEST)
    return np.int32(place if place >= 0 else place ^ 0x7FFFFFFF).view(np.float32)


@compiled()
def _smallest_kept(values, weights, target, low):
    """Return the largest bound so that the weights of values >= bound add up to `target` or more.

    The search begins at the place `low`, LOWEST or 0; with 0, values are at most 1. They are not
    sorted: each pass sums the weights above three bounds, which gives two bits of the result. If
    all weights add up to less than `target`, the bound is the float at `low`.
    """
    step = 1 << 30 if low < 0 else 1 << 28  # the place of 1 is less than 1 << 30
    while step > 0:
        first, second = _float_at(low + step), _float_at(low + 2 * step)
        third = _float_at(low + 3 * step)
        sum_1, sum_2, sum_3 = f32(0), f32(0), f32(0)
        for i in range(len(values)):
            sum_1 += weights[i] if values[i] >= first else f32(0)
            sum_2 += weights[i] if values[i] >= second else f32(0)
            sum_3 += weights[i] if values[i] >= third else f32(0)
        low += step * (int(sum_1 >= target) + int(sum_2 >= target) + int(sum_3 >= target))
        step >>= 2
    return _float_at(low)


@compiled()
def _kth_largest(values, k):
    return _smallest_kept(values, np.ones(len(values), f32), f32(k), LOWEST)


@compiled()
def _keep_candidates(values, maxima, top_k, tokens):
    """Move the candidates of top-k to the front of `values`, with their ids in `tokens`.

    Return their number.
    """
    bound, count = _kth_largest(maxima, top_k), 0
    for group in range(len(maxima)):
        if maxima[group] >= bound:
            for i in range(group * GROUP, min((group + 1) * GROUP, len(values))):
                if values[i] >= bound:
                    values[count], tokens[count] = values[i], i
                    count += 1
    return count


@compiled()
def _weigh(values, weights, top, temperature, filters):
    """Set the weights of the candidates [n]. Return the smallest weight that the filters keep."""
    top_k, top_p, min_p = np.int64(filters[0]), filters[1], filters[2]
    total = _exp_weights(values, top, temperature, weights)
    if 0 < top_k < len(values):
        bound = _kth_largest(values, top_k)
        for i in range(len(values)):
            weights[i] = weights[i] if values[i] >= bound else f32(0)
        total = _sum_from(weights, f32(0))
    smallest = max(min_p, MIN_WEIGHT)
    if top_p < 1:
        smallest = max(smallest, _smallest_kept(weights, weights, top_p * total, 0))
    # The weight of the most likely token is 1. It is always kept, whatever the rounding.
    return min(smallest, f32(1))


@compiled()
def draw_rows(address, is_bf16, size, temperatures, seeds, positions, filters, tokens,
               start, stop):
    """Set tokens [R]; filters [3, R] are top_k, top_p and min_p."""
    # Allocating them for each row would cost more than drawing the row.
    room = size if np.any(temperatures[start:stop] > 0) else 0
    values, weights, ids = np.empty(room, f32), np.empty(room, f32), np.empty(room, np.int32)
    maxima, sums = np.empty((2, (size + GROUP - 1) // GROUP), f32)
    for row in range(start, stop):
        if temperatures[row] == 0:
            load_maxima(address, is_bf16, row * size, size, maxima, 0, len(maxima))
            tokens[row] = most_likely(address, is_bf16, row * size, size, maxima)
            continue
        top = _load(address, is_bf16, row * size, values, maxima)
        if not -INFINITY < top < INFINITY:
            tokens[row] = -1
            continue
        temperature, count = max(temperatures[row], MIN_TEMPERATURE), size
        if 0 < filters[0, row] <= len(maxima):
            count = _keep_candidates(values, maxima, filters[0, row], ids)
        smallest = _weigh(values[:count], weights[:count], top, temperature, filters[:, row])
        groups, total = (count + GROUP - 1) // GROUP, 0.0
        for group in range(groups):
            part = weights[group * GROUP : min((group + 1) * GROUP, count)]
            sums[group] = _sum_from(part, smallest)
            total += sums[group]
        target = _uniform(seeds[row], positions[row]) * total
        group, before = _search_cumsum(sums[:groups], MIN_WEIGHT, target)
        part = weights[group * GROUP : min((group + 1) * GROUP, count)]
        index, _ = _search_cumsum(part, smallest, target - before)
        index += group * GROUP
        tokens[row] = ids[index] if count < size else index


@compiled()
def _logprobs_of_rows(address, is_bf16, size, tokens, packed, start, stop):
    """Fill packed [R, 2 + 2k] as `token_logprobs` in models/sampler.py."""
    k, values, weights = (packed.shape[1] - 2) // 2, np.empty(size, f32), np.empty(size, f32)
    maxima = np.empty((size + GROUP - 1) // GROUP, f32)
    for row in range(start, stop):
        top = _load(address, is_bf16, row * size, values, maxima)
        log_sum = top + np.log(_exp_weights(values, top, f32(1), weights))
        logit, rank = values[tokens[row]], 1
        for i in range(size):
            rank += np.int64(values[i] > logit)
        packed[row, 0], packed[row, 1] = logit - log_sum, rank
        for i in range(k):
            token, group = _first_largest(values, maxima)
            packed[row, 2 + i], packed[row, 2 + k + i] = values[token] - log_sum, token
            values[token] = -np.inf
            maxima[group] = maximum(values[group * GROUP : (group + 1) * GROUP])
