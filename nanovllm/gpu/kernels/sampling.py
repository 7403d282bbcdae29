"""Sampling on a GPU: temperature, top-k, top-p, min-p and the draw, without sorting or waiting.

The reference is nanovllm.models.sampler: it has the same filters and the same random numbers. Rows
skip on the device what they do not need, so one CUDA graph serves every mix. Three launches:

1. `_threshold`: each filter keeps the tokens whose logit is at least a threshold: the largest one
   that keeps k tokens (top-k) or probability p (top-p, arXiv:1904.09751). A radix search finds it
   exactly, digit by digit in base 4, in integers that order like floats. It takes 8 passes over a
   row of bfloat16 logits and 16 over float32.
2. `_weigh_chunks`: the maximum and the sum of weights of each chunk of the vocabulary. The weight
   of a token is exp((logit - maximum) / temperature), or 0 below the threshold.
3. `_draw`: inverts the cumulative distribution at u in [0, 1), a function of (seed, position). It
   selects a chunk and then a token in it, so that it reads the logits of only one chunk:

    weights of the chunks    [   2.1   |   0.4   |   1.5   ]     total 4.0
    u = 0.6, target = 2.4     0 ..... 2.1 .^. 2.5 ..... 4.0      chunk 1, remainder 2.4 - 2.1 = 0.3
    weights in chunk 1       [ 0.1 | 0.0 | 0.25 | 0.05 ]
    cumulative                 0.1   0.1   0.35   0.4            token 2, the first above 0.3
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.batch import SamplingBatch
from nanovllm.plan import FILTERS

# A chunk of the vocabulary has this many tokens.
CHUNK = 2048
# The radix search loads this many tokens at a time.
TILE = 8192


@triton.jit
def _to_key(x):
    """Map float32 to int32 with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(
    row_logits, min_key, target, max_logit, inv_temperature,
    V: tl.constexpr, TILE: tl.constexpr, COUNT: tl.constexpr,
):
    """The largest key such that the tokens with this key or a larger one weigh at least `target`.

    A token weighs 1 (COUNT) or exp((logit - max_logit) / temperature), and 0 below `min_key`.
    """
    # Keys of 16-bit floats never differ in the last digits alone: bfloat16 needs half the passes.
    dtype = row_logits.dtype.element_ty
    LAST_STEP: tl.constexpr = 65536 if dtype == tl.bfloat16 else 4096 if dtype == tl.float16 else 1
    result = tl.full((), -(2**31), tl.int32)
    step = tl.full((), 2**30, tl.int32)
    while step >= LAST_STEP:
        acc_1 = tl.zeros([TILE], tl.float32)
        acc_2 = tl.zeros([TILE], tl.float32)
        acc_3 = tl.zeros([TILE], tl.float32)
        for start in range(0, V, TILE):
            token = start + tl.arange(0, TILE)
            x = tl.load(row_logits + token, mask=token < V, other=float("-inf")).to(tl.float32)
            key = _to_key(x)
            weight = tl.where((token < V) & (key >= min_key), 1.0, 0.0)
            if not COUNT:
                weight *= tl.exp((x - max_logit) * inv_temperature)
            acc_1 += tl.where(key >= result + step, weight, 0.0)
            acc_2 += tl.where(key >= result + 2 * step, weight, 0.0)
            acc_3 += tl.where(key >= result + 3 * step, weight, 0.0)
        sum_1, sum_2, sum_3 = tl.sum(acc_1, 0), tl.sum(acc_2, 0), tl.sum(acc_3, 0)
        digit = (sum_1 >= target).to(tl.int32) + (sum_2 >= target).to(tl.int32)
        result += step * (digit + (sum_3 >= target).to(tl.int32))
        step = step // 4
    return result


@triton.jit
def _threshold(
    logits, temperatures, top_ks, top_ps, min_ps, thresholds, V: tl.constexpr, TILE: tl.constexpr
):
    """One program finds the smallest logit that the filters of a row keep, -inf without filters."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    threshold = tl.full((), float("-inf"), tl.float32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        row_logits = logits + row.to(tl.int64) * V
        max_logit = tl.full((), float("-inf"), tl.float32)
        for start in range(0, V, TILE):
            token = start + tl.arange(0, TILE)
            x = tl.load(row_logits + token, mask=token < V, other=float("-inf")).to(tl.float32)
            max_logit = tl.maximum(max_logit, tl.max(x, 0))
        inv_temperature = 1.0 / temperature
        key = tl.full((), -(2**31), tl.int32)
        if top_k > 0:
            count = top_k.to(tl.float32)
            key = _search(row_logits, key, count, max_logit, inv_temperature, V, TILE, True)
        if top_p < 1:
            total_weight = 0.0
            for start in range(0, V, TILE):
                token = start + tl.arange(0, TILE)
                x = tl.load(row_logits + token, mask=token < V, other=float("-inf")).to(tl.float32)
                kept = (token < V) & (_to_key(x) >= key)
                weight = tl.exp((x - max_logit) * inv_temperature)
                total_weight += tl.sum(tl.where(kept, weight, 0.0), 0)
            target = top_p * total_weight
            key = tl.maximum(
                key, _search(row_logits, key, target, max_logit, inv_temperature, V, TILE, False)
            )
        # The most likely token stays, even if rounding leaves no token above the threshold.
        threshold = tl.where((top_k > 0) | (top_p < 1), _from_key(key), threshold)
        threshold = tl.minimum(threshold, max_logit)
        if min_p > 0:
            threshold = tl.maximum(threshold, max_logit + temperature * tl.log(min_p))
    tl.store(thresholds + row, threshold)


@triton.jit
def _weigh_chunks(
    logits, temperatures, thresholds, chunk_max, chunk_argmax, chunk_sum,
    V: tl.constexpr, CHUNK: tl.constexpr,
):
    """One program finds the maximum, its token and the sum of weights of one chunk of one row."""
    row, chunk, num_chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * V + token, mask=token < V, other=float("-inf"))
    x = x.to(tl.float32)
    max_logit = tl.max(x, 0)
    temperature = tl.load(temperatures + row)
    kept = (token < V) & (x >= tl.load(thresholds + row)) & (x > float("-inf"))
    weight = tl.exp((x - max_logit) / tl.where(temperature > 0, temperature, 1.0))
    index = row * num_chunks + chunk
    tl.store(chunk_max + index, max_logit)
    tl.store(chunk_argmax + index, chunk * CHUNK + tl.argmax(x, 0))
    tl.store(chunk_sum + index, tl.sum(tl.where(kept, weight, 0.0), 0))


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed, position):
    """A number in [0, 1) by SplitMix64 (Steele et al. 2014), the same as in models/sampler.py."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    z = _mix(seed.to(tl.uint64, bitcast=True) + position.to(tl.uint64, bitcast=True) * golden)
    z = _mix(z + golden)
    return (z >> 11).to(tl.float64) * (2.0**-53)


@triton.jit
def _draw(
    logits, temperatures, thresholds, chunk_max, chunk_argmax, chunk_sum, seeds, positions, tokens,
    num_chunks, V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS_PAD: tl.constexpr,
):
    """One program draws the token of one row; the most likely one at temperature 0."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    chunk = tl.arange(0, CHUNKS_PAD)
    index, in_range = row * num_chunks + chunk, chunk < num_chunks
    maxima = tl.load(chunk_max + index, mask=in_range, other=float("-inf"))
    max_logit = tl.max(maxima, 0)
    if temperature > 0:
        weight = tl.load(chunk_sum + index, mask=in_range, other=0.0)
        weight = tl.where(weight > 0, weight * tl.exp((maxima - max_logit) / temperature), 0.0)
        cumulative = tl.cumsum(weight, 0)
        u = _uniform(tl.load(seeds + row), tl.load(positions + row))
        target = u * tl.sum(weight, 0)
        # If rounding keeps every cumulative weight at or below the target, the last chunk with a
        # nonzero weight is chosen. The same holds for the token below.
        last = tl.max(tl.where(weight > 0, chunk, 0), 0)
        chosen = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), last)
        remainder = target - tl.sum(tl.where(chunk < chosen, weight, 0.0), 0)
        token = chosen * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * V + token, mask=token < V, other=float("-inf"))
        x = x.to(tl.float32)
        kept = (token < V) & (x >= tl.load(thresholds + row)) & (x > float("-inf"))
        weight = tl.where(kept, tl.exp((x - max_logit) / temperature), 0.0)
        last = tl.max(tl.where(weight > 0, tl.arange(0, CHUNK), 0), 0)
        offset = tl.sum((tl.cumsum(weight, 0) <= remainder).to(tl.int32), 0)
        drawn = chosen * CHUNK + tl.minimum(offset, last)
    else:
        first = tl.min(tl.where(in_range & (maxima == max_logit), chunk, CHUNKS_PAD), 0)
        drawn = tl.load(chunk_argmax + row * num_chunks + tl.minimum(first, num_chunks - 1))
    # Comparisons with NaN could select a token outside the vocabulary.
    tl.store(tokens + row, tl.minimum(drawn, V - 1).to(tl.int64))


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample token ids [R] int64 from logits [R, V] of any floating-point dtype, contiguous.

    A filter keeps all tokens whose logits equal its threshold. A row of NaN gives some valid token.
    """
    (num_rows, vocab_size), device = logits.shape, logits.device
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=device)
    chunk_max = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    chunks = chunk_max, torch.empty_like(chunk_max, dtype=torch.int32), torch.empty_like(chunk_max)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    temperature, filters, known = batch.temperature, {**batch.filters}, {"top_k", "top_p", "min_p"}
    if unknown := filters.keys() - known:
        raise NotImplementedError(f"the kernel _threshold has no filter {min(unknown)!r}")
    for name in known - filters.keys():
        like = batch.seeds if name == "top_k" else temperature
        filters[name] = torch.full_like(like, FILTERS[name])
    _threshold[(num_rows,)](
        logits, temperature, filters["top_k"], filters["top_p"], filters["min_p"], thresholds,
        V=vocab_size, TILE=min(TILE, triton.next_power_of_2(vocab_size)), num_warps=16,
    )
    _weigh_chunks[(num_rows, num_chunks)](
        logits, temperature, thresholds, *chunks, V=vocab_size, CHUNK=CHUNK, num_warps=4
    )
    _draw[(num_rows,)](
        logits, temperature, thresholds, *chunks, batch.seeds, batch.positions, tokens, num_chunks,
        V=vocab_size, CHUNK=CHUNK, CHUNKS_PAD=triton.next_power_of_2(num_chunks), num_warps=4,
    )
    return tokens
