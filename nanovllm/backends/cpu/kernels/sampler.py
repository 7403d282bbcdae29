"""The sampler on a CPU: filters, draws and log-probabilities.

The reference is models/sampler.py: it has the same filters and the same random numbers. A row of
logits is read once, in chunks of tokens whose maxima are kept. A token is drawn by its weight
e^((logit - maximum) / temperature): first the chunk, by the sums of weights, then the token. With
top-k only few tokens are candidates: at least k tokens reach the k-th largest of the maxima, so
smaller logits cannot be among the k largest.
"""

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels.parallel import run
from nanovllm.backends.cpu.kernels.primitives import (
    BFLOAT16,
    array,
    exp,
    f32,
    maximum,
    to_float32,
)
from nanovllm.models import sampler
from nanovllm.models.batch import SamplingBatch
from nanovllm.plan import FILTERS

INFINITY = f32(np.inf)
# The filters of `sample`, in its order. With any other, models/sampler.py samples the tokens.
IN_KERNEL = ("top_k", "top_p", "min_p")
CHUNK = 256  # tokens
# The lowest temperature used: its reciprocal is finite.
MIN_TEMPERATURE = f32(1.2e-38)
# Less than any weight of a token that can be drawn, e^-87 or more.
MIN_WEIGHT = f32(1e-38)


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
    """Compute models.raw_logprobs.token_logprobs, reading each row once."""
    logits = logits.contiguous()
    packed = np.empty((len(logits), 2 + 2 * k))
    source = logits.data_ptr(), logits.dtype is torch.bfloat16, logits.shape[1]
    run(_logprobs_of_rows, (*source, tokens.numpy(), packed), len(logits), logits.numel())
    return torch.from_numpy(packed)


@compiled()
def _load_maxima(address, is_bf16, start, size, maxima):
    """Set maxima [chunks] of the chunks of a row, which begins at `start`."""
    full = array(address + 4 * start, (size,), f32(0))
    half = array(address + 2 * start, (size,), BFLOAT16)
    for chunk in range(len(maxima)):
        part = slice(chunk * CHUNK, min((chunk + 1) * CHUNK, size))
        # LLVM vectorizes loops over whole arrays, such as these slices: 30 times as fast.
        maxima[chunk] = maximum(half[part]) if is_bf16 else maximum(full[part])


@compiled()
def _load(address, is_bf16, start, values, maxima):
    """Set values [V] to the logits of a row in float32, and maxima [chunks]. Return the maximum.

    The row begins at `start`. If it has a NaN, the maximum is infinity.
    """
    if is_bf16:
        half = array(address + 2 * start, (len(values),), BFLOAT16)
        for i in range(len(values)):
            values[i] = to_float32(half[i])
    else:
        values[:] = array(address + 4 * start, (len(values),), f32(0))
    _load_maxima(address, is_bf16, start, len(values), maxima)
    return maximum(maxima)


@compiled()
def _most_likely(address, is_bf16, start, size, maxima):
    """Return the first token with the maximum of a row, or -1 if the maximum is not finite."""
    first = np.argmax(maxima) * CHUNK
    part = np.empty(min(CHUNK, size - first), f32)
    top = _load(address, is_bf16, start + first, part, np.empty(1, f32))
    return first + np.argmax(part) if -INFINITY < top < INFINITY else -1


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


@compiled(inline=True)
def _exp_weights(logits, top, temperature, weights):
    """Set weights to e^((logits - top) / temperature), or 0 below e^-87. Return their sum."""
    total = f32(0)
    for i in range(len(logits)):
        power = (logits[i] - top) / temperature
        weights[i] = exp(power) if power > f32(-87) else f32(0)
        total += weights[i]
    return total


@compiled(inline=True)
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
def _smallest_kept(weights, addends, target):
    """Return the largest bound so that the addends of weights >= bound add up to `target` or more.

    Weights [n] are from 0 to 1 and are not sorted. Floats are in the order of their bits: each pass
    sums the addends above three bounds, which gives two bits of the result. If all addends add up
    to less than `target`, the result is 0.
    """
    low = 0
    for shift in range(28, -1, -2):  # the bits of 1 are less than 1 << 30
        first = np.int32(low + (1 << shift)).view(np.float32)
        second = np.int32(low + (2 << shift)).view(np.float32)
        third = np.int32(low + (3 << shift)).view(np.float32)
        sum_1, sum_2, sum_3 = f32(0), f32(0), f32(0)
        for i in range(len(weights)):
            sum_1 += addends[i] if weights[i] >= first else f32(0)
            sum_2 += addends[i] if weights[i] >= second else f32(0)
            sum_3 += addends[i] if weights[i] >= third else f32(0)
        low += (int(sum_1 >= target) + int(sum_2 >= target) + int(sum_3 >= target)) << shift
    return np.int32(low).view(np.float32)


@compiled()
def _keep_candidates(values, maxima, top_k, tokens):
    """Move the candidates of top-k to the front of `values`, with their ids in `tokens`.

    Return their number.
    """
    bound = np.partition(maxima, len(maxima) - top_k)[-top_k]
    count = 0
    for chunk in range(len(maxima)):
        if maxima[chunk] >= bound:
            for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(values))):
                if values[i] >= bound:
                    values[count] = values[i]
                    tokens[count] = i
                    count += 1
    return count


@compiled()
def _smallest_drawn(weights, filters):
    """Return the smallest of the candidates' weights [n] that the filters keep."""
    top_k, top_p, min_p = filters
    kth = f32(0)
    if 0 < top_k < len(weights):
        kth = _smallest_kept(weights, np.ones(len(weights), f32), top_k)
    smallest = max(kth, min_p, MIN_WEIGHT)
    if top_p < 1:
        target = top_p * _sum_from(weights, kth)
        smallest = max(smallest, _smallest_kept(weights, weights, target))
    # The weight of the most likely token is 1. It is always kept, whatever the rounding.
    return min(smallest, f32(1))


@compiled()
def draw_rows(address, is_bf16, size, temperatures, seeds, positions, filters, tokens,
               start, stop):
    """Set tokens [R]; filters [3, R] are top_k, top_p and min_p."""
    # Allocating them for each row would cost more than drawing the row.
    room = size if np.any(temperatures[start:stop] > 0) else 0
    values = np.empty(room, f32)
    weights = np.empty(room, f32)
    ids = np.empty(room, np.int32)
    maxima, sums = np.empty((2, (size + CHUNK - 1) // CHUNK), f32)
    for row in range(start, stop):
        if temperatures[row] == 0:
            _load_maxima(address, is_bf16, row * size, size, maxima)
            tokens[row] = _most_likely(address, is_bf16, row * size, size, maxima)
            continue
        top = _load(address, is_bf16, row * size, values, maxima)
        if not -INFINITY < top < INFINITY:
            tokens[row] = -1
            continue
        temperature = max(temperatures[row], MIN_TEMPERATURE)
        count = size
        if 0 < filters[0, row] <= len(maxima):
            count = _keep_candidates(values, maxima, np.int64(filters[0, row]), ids)
        _exp_weights(values[:count], top, temperature, weights[:count])
        smallest = _smallest_drawn(weights[:count], filters[:, row])
        chunks = (count + CHUNK - 1) // CHUNK
        total = 0.0
        for chunk in range(chunks):
            part = weights[chunk * CHUNK : min((chunk + 1) * CHUNK, count)]
            sums[chunk] = _sum_from(part, smallest)
            total += sums[chunk]
        target = _uniform(seeds[row], positions[row]) * total
        chunk, before = _search_cumsum(sums[:chunks], MIN_WEIGHT, target)
        part = weights[chunk * CHUNK : min((chunk + 1) * CHUNK, count)]
        index, _ = _search_cumsum(part, smallest, target - before)
        index += chunk * CHUNK
        tokens[row] = ids[index] if count < size else index


@compiled()
def _logprobs_of_rows(address, is_bf16, size, tokens, packed, start, stop):
    """Fill packed [R, 2 + 2k] as `token_logprobs` in models/raw_logprobs.py."""
    k = (packed.shape[1] - 2) // 2
    values = np.empty(size, f32)
    weights = np.empty(size, f32)
    maxima = np.empty((size + CHUNK - 1) // CHUNK, f32)
    for row in range(start, stop):
        top = _load(address, is_bf16, row * size, values, maxima)
        log_sum = top + np.log(_exp_weights(values, top, f32(1), weights))
        logit = values[tokens[row]]
        rank = 1
        for i in range(size):
            rank += np.int64(values[i] > logit)
        packed[row, 0] = logit - log_sum
        packed[row, 1] = rank
        for i in range(k):
            chunk = np.argmax(maxima)
            rest = values[chunk * CHUNK : (chunk + 1) * CHUNK]
            token = chunk * CHUNK + np.argmax(rest)
            packed[row, 2 + i] = values[token] - log_sum
            packed[row, 2 + k + i] = token
            values[token] = -np.inf
            maxima[chunk] = maximum(rest)
