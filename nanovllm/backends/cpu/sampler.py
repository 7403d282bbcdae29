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
from nanovllm.backends.cpu.primitives import BFLOAT16, array, exp, maximum, maximum_in, to_float32
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
# For more candidates than this, top-p searches the bits of floats, because the branches of a
# quickselect cost more.
MANY = 4096
# `_logprobs_of_rows` inserts the most likely tokens one by one, which is slow for more of them.
MAX_LOGPROBS = 64


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return token ids [R] int64 for logits [R, V] in float32 or bfloat16."""
    values = batch.filters
    if not values.keys() <= set(IN_KERNEL):
        return sampler.sample(logits, batch)
    logits, (rows, size) = logits.contiguous(), logits.shape
    tokens, filters = np.empty(rows, np.int64), np.empty((len(IN_KERNEL), rows), np.float32)
    for i, name in enumerate(IN_KERNEL):
        filters[i] = values[name].numpy() if name in values else FILTERS[name]
    top_k, top_p, min_p = filters
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    chunks = -(-size // CHUNK)
    chunk_max, sums = np.empty((2, rows, chunks), np.float32)
    maxima = np.empty((rows, chunks * GROUPS), np.float32)
    source = logits.data_ptr(), logits.dtype is torch.bfloat16, size
    temperature, found = batch.temperature.numpy(), (filtered, maxima, chunk_max, sums)
    run(_weigh_chunks, (*source, temperature, *found), rows * chunks, rows * size)
    numbers = temperature, batch.seeds.numpy(), batch.positions.numpy()
    run(_draw_rows, (*source, *numbers, filters, *found, tokens), rows, rows * size)
    return torch.from_numpy(tokens)


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Compute models.logprobs.token_logprobs in one pass over each row."""
    if k > MAX_LOGPROBS:
        return logprobs.token_logprobs(logits, tokens, k)
    logits, packed = logits.contiguous(), np.empty((len(logits), 2 + 2 * k))
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
def _group_maxima(wide, lanes, maxima):
    """Set maxima [GROUPS] to the maximum of each group of a chunk; -inf for groups past its end."""
    for group in range(GROUPS):
        part = wide[group * GROUP : (group + 1) * GROUP]
        maxima[group] = maximum_in(part, lanes) if len(part) else -INFINITY


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
def _search_cumsum(weights, target):
    """Return (first index of positive weight with a cumulative sum above target, sum before it)."""
    index, before, total = 0, 0.0, 0.0
    for i in range(len(weights)):
        if weights[i] > 0:
            index, before = i, total
            total += weights[i]
            if total > target:
                break
    return index, before


@compiled()
def _smallest_kept(values, weights, target):
    """Return the largest value v of values [n] so that all values >= v weigh `target` or more.

    This is a quickselect, which reorders both arrays: larger values move to the front.
    """
    start, stop = 0, len(values)
    while stop - start > 1:
        pivot = values[(start + stop) // 2]
        above, i, below = start, start, stop
        larger, equal = 0.0, 0.0
        while i < below:
            value, weight = values[i], weights[i]
            if value > pivot:
                values[i], weights[i] = values[above], weights[above]
                values[above], weights[above] = value, weight
                larger += weight
                above += 1
                i += 1
            elif value < pivot:
                below -= 1
                values[i], weights[i] = values[below], weights[below]
                values[below], weights[below] = value, weight
            else:
                equal += weight
                i += 1
        if larger >= target:
            stop = above
        elif larger + equal >= target or below == stop:
            return pivot
        else:
            target -= larger + equal
            start = below
    return values[start]


@compiled()
def _sum_from(weights, bound):
    """Return the sum of the weights that are at least `bound`."""
    total = f32(0)
    for i in range(len(weights)):
        total += weights[i] if weights[i] >= bound else f32(0)
    return total


@compiled()
def _smallest_kept_of_many(weights, target):
    """Compute `_smallest_kept` of the weights themselves by a search over the bits of floats.

    It is for many weights. Positive floats have the order of their bits. One pass sums the weights
    above three bounds.
    """
    low, step = 0, 1 << 28
    while step > 0:
        first, second, third = _float(low + step), _float(low + 2 * step), _float(low + 3 * step)
        sum_1, sum_2, sum_3 = f32(0), f32(0), f32(0)
        for i in range(len(weights)):
            sum_1 += weights[i] if weights[i] >= first else f32(0)
            sum_2 += weights[i] if weights[i] >= second else f32(0)
            sum_3 += weights[i] if weights[i] >= third else f32(0)
        low += step * (int(sum_1 >= target) + int(sum_2 >= target) + int(sum_3 >= target))
        step >>= 2
    return _float(low)


@compiled()
def _float(bits):
    return np.int32(bits).view(np.float32)


@compiled()
def _draw_filtered(address, is_bf16, start, size, maxima, temperature, filters, u, scratch, tokens):
    """Draw from a row whose logits begin at `start`; maxima [groups] has the maximum of each group.

    scratch [2, V] float32 and tokens [V] int32 are overwritten.
    """
    top_k, top_p, min_p = np.int64(filters[0]), filters[1], filters[2]
    top, num, count = maximum(maxima), len(maxima), 0
    values, few = scratch[0], 0 < top_k <= num
    if few:
        bound = _smallest_kept(maxima.copy(), np.ones(num, f32), top_k)
        wide = np.empty(GROUP, f32)
        for group in range(num):
            if maxima[group] >= bound:
                first = group * GROUP
                part = wide[: min(GROUP, size - first)]
                _load(address, is_bf16, start + first, part)
                for i in range(len(part)):
                    if part[i] >= bound:
                        values[count], tokens[count] = part[i], first + i
                        count += 1
    else:
        count = size
        _load(address, is_bf16, start, values)
    values, weights = values[:count], scratch[1, :count]
    total = _exp_weights(values, top, temperature, weights)
    smallest = f32(0)  # of the weights that are kept
    if 0 < top_k < count:
        kth = _smallest_kept(values.copy(), np.ones(count, f32), top_k)
        for i in range(count):
            weights[i] = weights[i] if values[i] >= kth else f32(0)
        total = _sum_from(weights, smallest)
    if top_p < 1:
        if count > MANY:
            smallest = _smallest_kept_of_many(weights, top_p * total)
        else:
            smallest = _smallest_kept(weights.copy(), weights.copy(), top_p * total)
    # The weight of the most likely token is 1. It is always kept, whatever the rounding.
    smallest = min(max(smallest, min_p), f32(1))
    # The chunk in which the cumulative sum exceeds the target, or the last with a weight.
    target, total = u * _sum_from(weights, smallest), 0.0
    chosen, before = 0, 0.0
    for first in range(0, count, CHUNK):
        chunk_sum = _sum_from(weights[first : first + CHUNK], smallest)
        if chunk_sum > 0:
            chosen, before = first, total
            total += chunk_sum
            if total > target:
                break
    part = weights[chosen : chosen + CHUNK]
    for i in range(len(part)):
        part[i] = part[i] if part[i] >= smallest else f32(0)
    index, _ = _search_cumsum(part, target - before)
    return tokens[chosen + index] if few else chosen + index


@compiled()
def _weigh_chunks(address, is_bf16, size, temperatures, filtered, maxima, chunk_max, sums, start,
                  stop):
    """Fill maxima [R, chunks * GROUPS], chunk_max and sums [R, chunks] in one pass over all logits.

    An item is a chunk of a row. Rows that are greedy or filtered need no sums.
    """
    chunks, wide, weights = chunk_max.shape[1], np.empty(CHUNK, f32), np.empty(CHUNK, f32)
    for item in range(start, stop):
        row, chunk = item // chunks, item % chunks
        first = chunk * CHUNK
        part = wide[: min(CHUNK, size - first)]
        _load(address, is_bf16, row * size + first, part)
        groups = maxima[row, chunk * GROUPS : (chunk + 1) * GROUPS]
        _group_maxima(part, weights[:16], groups)
        top = max(max(groups[0], groups[1]), max(groups[2], groups[3]))
        chunk_max[row, chunk], sums[row, chunk] = top, 0
        if temperatures[row] > 0 and top > -np.inf and not filtered[row]:
            temperature = max(temperatures[row], MIN_TEMPERATURE)
            sums[row, chunk] = _exp_weights(part, top, temperature, weights)


@compiled()
def _draw_rows(address, is_bf16, size, temperatures, seeds, positions, filters, filtered, maxima,
               chunk_max, sums, tokens, start, stop):
    """Draw tokens [R] from what _weigh_chunks found; filters [3, R] are top_k, top_p and min_p."""
    chunks, wide, weights = chunk_max.shape[1], np.empty(CHUNK, f32), np.empty(CHUNK, f32)
    # Allocating it for each row would cost more than drawing the row.
    length = size if filtered[start:stop].any() else 0
    scratch, ids = np.empty((2, length), f32), np.empty(length, np.int32)
    for row in range(start, stop):
        top, temperature = maximum(chunk_max[row]), max(temperatures[row], MIN_TEMPERATURE)
        u = _uniform(seeds[row], positions[row])
        if not -INFINITY < top < INFINITY:
            tokens[row] = -1
        elif temperatures[row] > 0 and filtered[row]:
            groups = maxima[row, : (size + GROUP - 1) // GROUP]
            tokens[row] = _draw_filtered(
                address, is_bf16, row * size, size, groups, temperature, filters[:, row], u,
                scratch, ids)
        elif temperatures[row] > 0:
            total = 0.0
            for chunk in range(chunks):
                sums[row, chunk] *= _weight((chunk_max[row, chunk] - top) / temperature)
                total += sums[row, chunk]
            chunk, before = _search_cumsum(sums[row], u * total)
            some = wide[: min(CHUNK, size - chunk * CHUNK)]
            _load(address, is_bf16, row * size + chunk * CHUNK, some)
            _exp_weights(some, top, temperature, weights)
            index, _ = _search_cumsum(weights[: len(some)], u * total - before)
            tokens[row] = chunk * CHUNK + index
        else:
            chunk = 0
            while chunk < chunks - 1 and chunk_max[row, chunk] != top:
                chunk += 1
            some = wide[: min(CHUNK, size - chunk * CHUNK)]
            _load(address, is_bf16, row * size + chunk * CHUNK, some)
            index = 0
            while index < len(some) - 1 and some[index] != top:
                index += 1
            tokens[row] = chunk * CHUNK + index


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
