"""The sampler on a CPU: filters, draws and log-probabilities, each logit read once or twice.

The reference is models/sampler.py: it has the same filters and the same random numbers. `sample`
takes the maximum and the sum of the weights e^((logit - maximum) / temperature) of each chunk of
the vocabulary, chooses a chunk, and reads that chunk again. With filters, a row is drawn from its
candidates. With top-k these are few: at least k tokens reach the k-th largest of the maxima of all
groups of tokens, so smaller logits cannot be among the k largest.
"""

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.parallel import run
from nanovllm.backends.cpu.primitives import BFLOAT16, array, exp, maximum, to_float32
from nanovllm.models import logprobs, sampler
from nanovllm.models.batch import SamplingBatch
from nanovllm.plan import FILTERS

f32 = np.float32
INFINITY = f32(np.inf)
# The filters of `sample`, in its order. With any other, models/sampler.py samples the tokens.
IN_KERNEL = ("top_k", "top_p", "min_p")
# Tokens of a chunk and of a group; a chunk is a whole number of groups.
CHUNK, GROUP = 1024, 256
GROUPS = CHUNK // GROUP
# The lowest temperature used: its reciprocal is finite.
MIN_TEMPERATURE = f32(1.2e-38)
# Less than any weight of a token that can be drawn, e^-87 or more.
MIN_WEIGHT = f32(1e-38)
# The places of floats in their order, from minus infinity to infinity; 0.0 has place 0.
LOWEST, HIGHEST = -0x7F800001, 0x7F800000
# `_logprobs_of_rows` inserts the most likely tokens one by one, which is slow for more of them.
MAX_LOGPROBS = 64


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
    top_k, top_p, min_p = filters
    temperatures = batch.temperature.numpy()
    filtered = (temperatures > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    chunks = -(-size // CHUNK)
    chunk_max, sums = np.empty((2, rows, chunks), np.float32)
    maxima = np.empty((rows, chunks * GROUPS), np.float32)
    source = logits.data_ptr(), logits.dtype is torch.bfloat16, size
    weighed = filtered, maxima, chunk_max, sums
    run(_weigh_chunks, (*source, temperatures, *weighed), rows * chunks, rows * size)
    tokens = np.empty(rows, np.int64)
    numbers = temperatures, batch.seeds.numpy(), batch.positions.numpy()
    run(_draw_rows, (*source, *numbers, filters, *weighed, tokens), rows, rows * size)
    return torch.from_numpy(tokens)


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Compute models.logprobs.token_logprobs in one pass over each row."""
    if k > MAX_LOGPROBS:
        return logprobs.token_logprobs(logits, tokens, k)
    logits = logits.contiguous()
    packed = np.empty((len(logits), 2 + 2 * k))
    source = logits.data_ptr(), logits.dtype is torch.bfloat16, logits.shape[1]
    run(_logprobs_of_rows, (*source, tokens.numpy(), packed), len(logits), logits.numel())
    return torch.from_numpy(packed)


@compiled()
def _load(address, is_bf16, start, wide):
    """Set wide [n] to the logits from `start` on, in float32, with +inf in place of NaN.

    `maximum` assumes that there is no NaN. min(inf, NaN) is inf.
    """
    if is_bf16:
        half = array(address + 2 * start, (len(wide),), BFLOAT16)
        for i in range(len(wide)):
            wide[i] = min(INFINITY, to_float32(half[i]))
    else:
        full = array(address + 4 * start, (len(wide),), f32(0))
        for i in range(len(wide)):
            wide[i] = min(INFINITY, full[i])


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
def _load_candidates(address, is_bf16, start, size, maxima, top_k, values, tokens):
    """Set values and tokens to logits and ids that include the k most likely. Return their number.

    The logits of the row begin at `start`; maxima [groups] has the maximum of each group. Unless k
    is small, all tokens are candidates, and their ids are not set.
    """
    if not 0 < top_k <= len(maxima):
        _load(address, is_bf16, start, values)
        return size
    bound = _smallest_kept(maxima, np.ones(len(maxima), f32), f32(top_k), LOWEST)
    wide, count = np.empty(GROUP, f32), 0
    for group in range(len(maxima)):
        if maxima[group] >= bound:
            first = group * GROUP
            part = wide[: min(GROUP, size - first)]
            _load(address, is_bf16, start + first, part)
            for i in range(len(part)):
                if part[i] >= bound:
                    values[count], tokens[count] = part[i], first + i
                    count += 1
    return count


@compiled()
def _weigh_candidates(values, weights, top, temperature, filters):
    """Set weights [n] for the logits of the candidates. Return the smallest weight that is kept."""
    top_k, top_p, min_p = np.int64(filters[0]), filters[1], filters[2]
    total = _exp_weights(values, top, temperature, weights)
    if 0 < top_k < len(values):
        bound = _smallest_kept(values, np.ones(len(values), f32), f32(top_k), LOWEST)
        for i in range(len(values)):
            weights[i] = weights[i] if values[i] >= bound else f32(0)
        total = _sum_from(weights, f32(0))
    smallest = max(min_p, MIN_WEIGHT)
    if top_p < 1:
        smallest = max(smallest, _smallest_kept(weights, weights, top_p * total, 0))
    # The weight of the most likely token is 1. It is always kept, whatever the rounding.
    return min(smallest, f32(1))


@compiled()
def _weigh_chunks(address, is_bf16, size, temperatures, filtered, maxima, chunk_max, sums, start,
                  stop):
    """Fill maxima [R, chunks * GROUPS], chunk_max and sums [R, chunks] in one pass over all logits.

    An item is a chunk of a row. The sums of rows that are greedy or filtered are 1.
    """
    chunks, wide, weights = chunk_max.shape[1], np.empty(CHUNK, f32), np.empty(CHUNK, f32)
    for item in range(start, stop):
        row, chunk = item // chunks, item % chunks
        first = chunk * CHUNK
        part = wide[: min(CHUNK, size - first)]
        _load(address, is_bf16, row * size + first, part)
        groups = maxima[row, chunk * GROUPS : (chunk + 1) * GROUPS]
        for i in range(GROUPS):
            groups[i] = maximum(part[i * GROUP : (i + 1) * GROUP])
        top = maximum(groups)
        chunk_max[row, chunk], sums[row, chunk] = top, 1
        if temperatures[row] > 0 and top > -np.inf and not filtered[row]:
            temperature = max(temperatures[row], MIN_TEMPERATURE)
            sums[row, chunk] = _exp_weights(part, top, temperature, weights)


@compiled()
def _draw_rows(address, is_bf16, size, temperatures, seeds, positions, filters, filtered, maxima,
               chunk_max, sums, tokens, start, stop):
    """Draw tokens [R] from what _weigh_chunks found; filters [3, R] are top_k, top_p and min_p."""
    # Allocating them for each row would cost more than drawing the row.
    length = size if filtered[start:stop].any() else CHUNK
    values, weights = np.empty(length, f32), np.empty(length, f32)
    ids = np.empty(length, np.int32)
    for row in range(start, stop):
        top, temperature = maximum(chunk_max[row]), max(temperatures[row], MIN_TEMPERATURE)
        if not -INFINITY < top < INFINITY:
            tokens[row] = -1
            continue
        count, smallest, chunk_sums = size, MIN_WEIGHT, sums[row]
        if filtered[row]:
            groups = maxima[row, : (size + GROUP - 1) // GROUP]
            count = _load_candidates(
                address, is_bf16, row * size, size, groups, filters[0, row], values, ids)
            smallest = _weigh_candidates(
                values[:count], weights[:count], top, temperature, filters[:, row])
        total = 0.0
        for chunk in range(len(chunk_sums)):
            if filtered[row]:
                part = weights[min(chunk * CHUNK, count) : min((chunk + 1) * CHUNK, count)]
                chunk_sums[chunk] = _sum_from(part, smallest)
            else:
                chunk_sums[chunk] *= _weight((chunk_max[row, chunk] - top) / temperature)
            total += chunk_sums[chunk]
        # A greedy row takes the first token whose weight is not 0.
        u = _uniform(seeds[row], positions[row]) if temperatures[row] > 0 else 0.0
        chunk, before = _search_cumsum(chunk_sums, MIN_WEIGHT, u * total)
        first = chunk * CHUNK
        if filtered[row]:
            part = weights[first : min(first + CHUNK, count)]
        else:
            part, logits = weights[: min(CHUNK, size - first)], values[: min(CHUNK, size - first)]
            _load(address, is_bf16, row * size + first, logits)
            _exp_weights(logits, top, temperature, part)
        index, _ = _search_cumsum(part, smallest, u * total - before)
        tokens[row] = ids[first + index] if count < size else first + index


@compiled()
def _logprobs_of_rows(address, is_bf16, size, tokens, packed, start, stop):
    """Fill packed [R, 2 + 2k] as models/logprobs.py describes it."""
    k = (packed.shape[1] - 2) // 2
    buffer, weights = np.empty(CHUNK, f32), np.empty(CHUNK, f32)
    for row in range(start, stop):
        _load(address, is_bf16, row * size + tokens[row], buffer[:1])
        logit, rank = buffer[0], 1
        values, ids = np.full(k, f32(-np.inf)), np.zeros(k, np.int64)
        top, total = f32(-np.inf), f32(0)
        for first in range(0, size, CHUNK):
            wide = buffer[: min(CHUNK, size - first)]
            _load(address, is_bf16, row * size + first, wide)
            for i in range(len(wide)):
                rank += np.int64(wide[i] > logit)
            chunk_max = maximum(wide)
            if chunk_max > top:
                total *= _weight(top - chunk_max)
                top = chunk_max
            if top > -np.inf:
                total += _exp_weights(wide, top, f32(1), weights)
            if k > 0 and chunk_max > values[k - 1]:
                for i in range(len(wide)):
                    if wide[i] > values[k - 1]:
                        at = k - 1
                        while at > 0 and wide[i] > values[at - 1]:
                            values[at], ids[at] = values[at - 1], ids[at - 1]
                            at -= 1
                        values[at], ids[at] = wide[i], first + i
        log_sum = top + np.log(total)
        packed[row, 0], packed[row, 1] = logit - log_sum, rank
        for i in range(k):
            packed[row, 2 + i], packed[row, 2 + k + i] = values[i] - log_sum, ids[i]
