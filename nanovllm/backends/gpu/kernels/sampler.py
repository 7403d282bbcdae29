"""Sampling on a GPU: temperature, top-k, top-p, min-p and the draw, without sorting or waiting.

The reference is nanovllm.models.sampler: it has the same filters and the same random numbers. Rows
skip on the device what they do not need, so one CUDA graph serves every mix. There are two
launches:

1. `_weigh_chunks` reads all logits once, to find the maximum and the sum of weights of each chunk
   of the vocabulary. The weight of a token is exp((logit - maximum) / temperature).
2. `_draw` filters a row and draws from it. Each filter keeps the tokens whose logit is at least a
   threshold: the largest one that keeps k tokens (top-k) or probability p (top-p,
   arXiv:1904.09751). A bisection finds it exactly, in integers that order like floats. A lower
   bound is known at the start: at least k logits reach the k-th largest maximum of the chunks.
   Only the chunks whose maximum reaches the bound are read; for top-k they are little more than k.

   The draw inverts the cumulative distribution at u in [0, 1), a function of (seed, position). It
   selects a chunk and then a token in it, and thus reads the logits of only one chunk:

    weights of the chunks    [   2.1   |   0.4   |   1.5   ]     total 4.0
    u = 0.6, target = 2.4     0 ..... 2.1 .^. 2.5 ..... 4.0      chunk 1, remainder 2.4 - 2.1 = 0.3
    weights in chunk 1       [ 0.1 | 0.0 | 0.25 | 0.05 ]
    cumulative                 0.1   0.1   0.35   0.4            token 2, the first above 0.3
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.gpu.kernels.launch import launch
from nanovllm.models.batch import SamplingBatch
from nanovllm.plan import FILTERS

# The filters of `_threshold`, in the order of its arguments.
IN_KERNEL = ("top_k", "top_p", "min_p")
# A chunk of the vocabulary has this many tokens.
CHUNK = tl.constexpr(128)
# One program of `_weigh_chunks` takes this many chunks, and `_draw` loads this many at a time.
WEIGHED, LOADED = tl.constexpr(16), tl.constexpr(32)
# The lowest finite float32. A logit of -inf is below every threshold.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _scale(temperature):
    """log2(e) / temperature, finite also at 0: exp2, which is one instruction, replaces exp."""
    return 1.4426950408889634 / tl.maximum(temperature, 1.2e-38)


# Slices of a batch's parameters may be unaligned, and a specialization takes a second to compile.
@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def _weigh_chunks(logits, temperatures, chunk_max, chunk_sum, V: tl.constexpr):
    """One program finds the maximum and the sum of weights of each of some chunks of one row."""
    row = tl.program_id(0)
    chunk = tl.program_id(1) * WEIGHED + tl.arange(0, WEIGHED)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits + row.to(tl.int64) * V + token, mask=token < V, other=float("-inf"))
    x = x.to(tl.float32)
    # A maximum ignores NaN, so it counts as +inf: a row with either has no token.
    max_logit = tl.max(tl.where(x < INFINITY, x, INFINITY), 1)
    # In a chunk of masked tokens the difference from the maximum, -inf, would be NaN.
    shift = tl.where(max_logit > float("-inf"), max_logit, 0.0)
    weight = tl.exp2((x - shift[:, None]) * _scale(tl.load(temperatures + row)))
    index = row * tl.num_programs(1) * WEIGHED + chunk
    tl.store(chunk_max + index, max_logit)
    tl.store(chunk_sum + index, tl.sum(weight, 1))


@triton.jit
def _to_key(x):
    """Map float32 to int64 with the same order; neighbours differ by 1."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _from_key(key):
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _list_chunks(listed, maxima, threshold):
    """Write the chunks whose maximum is at least `threshold` to `listed`; return their number."""
    reached = (maxima >= threshold).to(tl.int32)
    position = tl.cumsum(reached, 0) - 1
    # The threads of a program share the list: all must have read the last one and written this one.
    tl.debug_barrier()
    tl.store(listed + position, tl.arange(0, maxima.shape[0]), mask=reached > 0)
    tl.debug_barrier()
    return tl.sum(reached, 0)


@triton.jit
def _load_listed(logits, listed, start, count, V: tl.constexpr):
    """(chunks [LOADED], their logits [LOADED, CHUNK]) of the list from `start`."""
    index = start + tl.arange(0, LOADED)
    # All tokens of chunk V are outside the vocabulary.
    chunk = tl.load(listed + index, mask=index < count, other=V)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits + token, mask=token < V, other=float("-inf"))
    return chunk, x.to(tl.float32)


@triton.jit
def _search(
    logits, listed, maxima, low, target, max_logit, scale,
    V: tl.constexpr, MEASURE: tl.constexpr,
):
    """The largest threshold for which MEASURE is at least `target`; `low` if none above it is.

    MEASURE is the number of "chunks" whose maximum is at least the threshold, the number of such
    "tokens", or their "weights".
    """
    dtype = logits.dtype.element_ty
    # The keys of neighbouring logits of this dtype differ by at least this much. The result for
    # chunks is a bound, which need not be exact.
    COARSE: tl.constexpr = dtype == tl.bfloat16 or MEASURE == "chunks"
    GAP: tl.constexpr = 65536 if COARSE else 8192 if dtype == tl.float16 else 1
    lower, upper = _to_key(low), _to_key(max_logit) + 1
    if MEASURE != "chunks":
        count = _list_chunks(listed, maxima, low)
    while upper - lower > GAP:
        middle = (lower + upper) // 2
        threshold = _from_key(middle)
        if MEASURE == "chunks":
            measured = tl.sum((maxima >= threshold).to(tl.float32), 0)
        else:
            acc = tl.zeros([LOADED, CHUNK], tl.float32)
            for start in range(0, count, LOADED):
                _, x = _load_listed(logits, listed, start, count, V)
                weight = 1.0 if MEASURE == "tokens" else tl.exp2((x - max_logit) * scale)
                acc += tl.where(x >= threshold, weight, 0.0)
            measured = tl.sum(acc)
        if measured >= target:
            lower = middle
            # A list that is loaded at once need not become shorter.
            if MEASURE != "chunks" and count > LOADED:
                count = _list_chunks(listed, maxima, threshold)
        else:
            upper = middle
    return _from_key(lower)


@triton.jit
def _weigh_kept(
    logits, listed, sums, maxima, threshold, max_logit, scale, V: tl.constexpr
):
    """The sum of weights of each chunk's tokens of at least `threshold`; it overwrites `sums`."""
    count = _list_chunks(listed, maxima, threshold)
    for start in range(0, count, LOADED):
        chunk, x = _load_listed(logits, listed, start, count, V)
        weight = tl.where(x >= threshold, tl.exp2((x - max_logit) * scale), 0.0)
        tl.store(sums + chunk, tl.sum(weight, 1), mask=start + tl.arange(0, LOADED) < count)
    tl.debug_barrier()
    return tl.load(sums + tl.arange(0, maxima.shape[0]), mask=maxima >= threshold, other=0.0)


@triton.jit
def _threshold(
    logits, listed, sums, maxima, total, max_logit, temperature, scale, top_k, top_p, min_p,
    V: tl.constexpr,
):
    """The smallest logit that the filters of a row keep. `total` is the weight of all tokens."""
    threshold = tl.full((), LOWEST, tl.float32)
    if top_k > 0:
        k = top_k.to(tl.float32)
        for measure in tl.static_range(2):
            threshold = _search(
                logits, listed, maxima, threshold, k, max_logit, scale, V,
                "tokens" if measure else "chunks",
            )
        kept = _weigh_kept(logits, listed, sums, maxima, threshold, max_logit, scale, V)
        total = tl.sum(kept, 0)
    if top_p < 1:
        # V tokens below this bound together weigh less than 1 - p of the total.
        bound = max_logit + temperature * tl.log((1.0 - top_p) * total / V)
        threshold = _search(
            logits, listed, maxima, tl.maximum(threshold, bound), top_p * total, max_logit, scale,
            V, "weights",
        )
    if min_p > 0:
        threshold = tl.maximum(threshold, max_logit + temperature * tl.log(min_p))
    # The most likely token stays, whatever was rounded.
    return tl.maximum(tl.minimum(threshold, max_logit), LOWEST)


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
def _first_above(weight, target):
    """The first index of positive weight at which the cumulative weight exceeds `target`.

    The weight must be tested, because a GPU adds in the order of a tree: a cumulative sum may
    change in the last place where the weight is 0. If no sum exceeds the target, by rounding, the
    result is the last index of positive weight.
    """
    index = tl.arange(0, weight.shape[0])
    last = tl.max(tl.where(weight > 0, index, 0), 0)
    exceeds = (weight > 0) & (tl.cumsum(weight, 0) > target)
    return tl.min(tl.where(exceeds, index, last), 0)


@triton.jit(do_not_specialize_on_alignment=[
    "temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions",
])
def _draw(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, chunk_max, chunk_sum, chunk_ids,
    tokens, V: tl.constexpr, CHUNKS: tl.constexpr,
):
    """One program draws the token of one row: at temperature 0 the first of the largest logits."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * V
    sums, listed = chunk_sum + row * CHUNKS, chunk_ids + row * CHUNKS
    chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))
    maxima = tl.load(chunk_max + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    max_logit = tl.max(maxima, 0)
    temperature = tl.load(temperatures + row)
    scale = _scale(temperature)
    if temperature > 0:
        u = _uniform(tl.load(seeds + row), tl.load(positions + row)).to(tl.float32)
        weight = tl.load(sums + chunk, mask=chunk < CHUNKS, other=0.0)
        weight = tl.where(weight > 0, weight * tl.exp2((maxima - max_logit) * scale), 0.0)
        threshold = tl.full((), LOWEST, tl.float32)
        top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
        if (top_k > 0) | (top_p < 1) | (min_p > 0):
            threshold = _threshold(
                logits, listed, sums, maxima, tl.sum(weight, 0), max_logit, temperature, scale,
                top_k, top_p, min_p, V,
            )
            weight = _weigh_kept(logits, listed, sums, maxima, threshold, max_logit, scale, V)
    else:
        u = tl.full((), 0.0, tl.float32)
        threshold = max_logit
        weight = tl.where(maxima >= max_logit, 1.0, 0.0)
    target = u * tl.sum(weight, 0)
    chosen = _first_above(weight, target)
    remainder = target - tl.sum(tl.where(chunk < chosen, weight, 0.0), 0)
    token = chosen * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + token, mask=token < V, other=float("-inf")).to(tl.float32)
    # The difference of infinite logits is NaN, so a row of temperature 0 does not use it.
    weight = tl.where(temperature > 0, tl.exp2((x - max_logit) * scale), 1.0)
    token = chosen * CHUNK + _first_above(tl.where(x >= threshold, weight, 0.0), remainder)
    # Without a positive weight the token could be outside the vocabulary.
    finite = (max_logit >= LOWEST) & (max_logit < INFINITY)
    token = tl.where(finite, tl.minimum(token, V - 1), -1)
    tl.store(tokens + row, token.to(tl.int64))


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample token ids [R] int64 from logits [R, V] of any floating-point dtype, contiguous.

    A filter keeps all tokens whose logits equal its threshold. A row without a token gives -1; see
    models/sampler.py.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    num_programs = -(-vocab_size // (CHUNK.value * WEIGHED.value))
    num_chunks = num_programs * WEIGHED.value
    chunk_max = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    chunk_sum = torch.empty_like(chunk_max)
    chunk_ids = torch.empty_like(chunk_max, dtype=torch.int32)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    temperature = batch.temperature
    filters = {**batch.filters}
    if unknown := filters.keys() - set(IN_KERNEL):
        raise NotImplementedError(f"the kernel _threshold has no filter {min(unknown)!r}")
    for name in set(IN_KERNEL) - filters.keys():
        like = batch.seeds if isinstance(FILTERS[name], int) else temperature
        filters[name] = torch.full_like(like, FILTERS[name])
    weighed = (logits, temperature, chunk_max, chunk_sum)
    grid = (num_rows, num_programs, 1)
    launch(_weigh_chunks, grid, weighed, dict(V=vocab_size), num_warps=4)
    args = (
        logits, temperature, *(filters[name] for name in IN_KERNEL), batch.seeds, batch.positions,
        chunk_max, chunk_sum, chunk_ids, tokens,
    )
    constants = dict(V=vocab_size, CHUNKS=num_chunks)
    launch(_draw, (num_rows, 1, 1), args, constants, num_warps=8)
    return tokens
