"""The sampler on a GPU: temperature, top-k, top-p, min-p and the draw, without a sort or a sync.

Owns: nothing. Given: logits and a SamplingBatch. Mutates: nothing. The reference is
nanovllm.runner.sampler: the same filters, and the same draw from the same number.

Three launches, and what a row does not ask for it skips on the device, so that one captured graph
serves every mix of rows:

1. `_threshold`: each filter keeps the tokens whose logit is at least some t: the largest t above
   which there are k tokens (top-k), or probability p (top-p). t is found digit by digit, in base 4,
   in the integers that order like floats: 8 passes over a row of bfloat16, 16 of float32, no sort,
   and exact.
2. `_weigh`: maximum and sum of weights of each chunk of the vocabulary.
3. `_draw`: inverts the cumulative distribution at u, in two levels: which chunk, then which of its
   tokens. The logits are read once, and one random number a row is enough (Gumbel noise takes one
   a token). u is a function of (seed, position) alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.runner.batch import SamplingBatch

CHUNK = 2048  # tokens of the vocabulary
TILE = 8192  # tokens that a search loads at a time


@triton.jit
def _key(x):
    """float32 -> int32 that orders alike; its own inverse, but for the type."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(row, floor, need, largest, per_temperature, V: tl.constexpr, TILE: tl.constexpr,
            COUNT: tl.constexpr):  # fmt: skip
    """The largest key t such that the tokens with keys of t or more weigh at least `need`.

    A token weighs 1 (COUNT) or exp((logit - largest) / temperature); those below `floor` nothing.
    """
    # Below the digits that the dtype has, no two keys differ: half the passes for bfloat16.
    LAST: tl.constexpr = (
        65536
        if row.dtype.element_ty == tl.bfloat16
        else (4096 if row.dtype.element_ty == tl.float16 else 1)
    )
    t = tl.full((), -(2**31), tl.int32)
    step = tl.full((), 2**30, tl.int32)
    while step >= LAST:
        lane_1 = tl.zeros([TILE], tl.float32)
        lane_2 = tl.zeros([TILE], tl.float32)
        lane_3 = tl.zeros([TILE], tl.float32)
        for start in range(0, V, TILE):
            token = start + tl.arange(0, TILE)
            x = tl.load(row + token, mask=token < V, other=float("-inf")).to(tl.float32)
            key = _key(x)
            weight = tl.where((token < V) & (key >= floor), 1.0, 0.0)
            if not COUNT:
                weight *= tl.exp((x - largest) * per_temperature)
            lane_1 += tl.where(key >= t + step, weight, 0.0)
            lane_2 += tl.where(key >= t + 2 * step, weight, 0.0)
            lane_3 += tl.where(key >= t + 3 * step, weight, 0.0)
        tail_1, tail_2, tail_3 = tl.sum(lane_1, 0), tl.sum(lane_2, 0), tl.sum(lane_3, 0)
        t += step * (
            (tail_1 >= need).to(tl.int32)
            + (tail_2 >= need).to(tl.int32)
            + (tail_3 >= need).to(tl.int32)
        )
        step = step // 4
    return t


@triton.jit
def _threshold(
    logits, temperature, top_k, top_p, min_p, thresholds, V: tl.constexpr, TILE: tl.constexpr
):
    """One program: the least logit that the filters of one row keep; -inf if it has none."""
    at = tl.program_id(0)
    heat = tl.load(temperature + at)
    k, p, least = tl.load(top_k + at), tl.load(top_p + at), tl.load(min_p + at)
    threshold = tl.full((), float("-inf"), tl.float32)
    if (heat > 0) & ((k > 0) | (p < 1) | (least > 0)):
        row = logits + at.to(tl.int64) * V
        largest = tl.full((), float("-inf"), tl.float32)
        for start in range(0, V, TILE):
            token = start + tl.arange(0, TILE)
            x = tl.load(row + token, mask=token < V, other=float("-inf")).to(tl.float32)
            largest = tl.maximum(largest, tl.max(x, 0))
        per_temperature = 1.0 / heat
        floor = tl.full((), -(2**31), tl.int32)
        if k > 0:
            floor = _search(row, floor, k.to(tl.float32), largest, per_temperature, V, TILE, True)
        if p < 1:
            mass = 0.0
            for start in range(0, V, TILE):
                token = start + tl.arange(0, TILE)
                x = tl.load(row + token, mask=token < V, other=float("-inf")).to(tl.float32)
                kept = (token < V) & (_key(x) >= floor)
                mass += tl.sum(tl.where(kept, tl.exp((x - largest) * per_temperature), 0.0), 0)
            found = _search(row, floor, p * mass, largest, per_temperature, V, TILE, False)
            floor = tl.maximum(floor, found)
        # Whatever p rounds to, the likeliest token stays.
        threshold = tl.minimum(tl.where((k > 0) | (p < 1), _float(floor), threshold), largest)
        if least > 0:
            threshold = tl.maximum(threshold, largest + heat * tl.log(least))
    tl.store(thresholds + at, threshold)


@triton.jit
def _weigh(
    logits, temperature, thresholds, maxima, winners, sums, V: tl.constexpr, CHUNK: tl.constexpr
):
    """One program: one chunk of one row. Its largest logit, whose that is, the sum of weights."""
    at, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + at.to(tl.int64) * V + token, mask=token < V, other=float("-inf"))
    x = x.to(tl.float32)
    largest = tl.max(x, 0)
    heat = tl.load(temperature + at)
    kept = (token < V) & (x >= tl.load(thresholds + at)) & (x > float("-inf"))
    weight = tl.exp((x - largest) / tl.where(heat > 0, heat, 1.0))
    place = at * chunks + chunk
    tl.store(maxima + place, largest)
    tl.store(winners + place, chunk * CHUNK + tl.argmax(x, 0))
    tl.store(sums + place, tl.sum(tl.where(kept, weight, 0.0), 0))


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed, position):
    """A number in [0, 1) for (seed, position): splitmix64, as in runner/sampler.py."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    z = _mix(seed.to(tl.uint64, bitcast=True) + position.to(tl.uint64, bitcast=True) * golden)
    z = _mix(z + golden)
    return (z >> 11).to(tl.float64) * (2.0**-53)


@triton.jit
def _draw(
    logits, temperature, thresholds, maxima, winners, sums, seeds, positions, tokens, chunks,
    V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    """One program: the token of one row."""
    at = tl.program_id(0)
    heat = tl.load(temperature + at)
    chunk = tl.arange(0, CHUNKS_PAD)
    place, real = at * chunks + chunk, chunk < chunks
    largest = tl.load(maxima + place, mask=real, other=float("-inf"))
    top = tl.max(largest, 0)
    if heat > 0:
        weight = tl.load(sums + place, mask=real, other=0.0)
        weight = tl.where(weight > 0, weight * tl.exp((largest - top) / heat), 0.0)
        cumulative = tl.cumsum(weight, 0)
        target = _uniform(tl.load(seeds + at), tl.load(positions + at)) * tl.sum(weight, 0)
        # The first chunk that passes the target, and none of weight 0, whatever the sums round to.
        last = tl.max(tl.where(weight > 0, chunk, 0), 0)
        found = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), last)
        rest = target - tl.sum(tl.where(chunk < found, weight, 0.0), 0)
        token = found * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + at.to(tl.int64) * V + token, mask=token < V, other=float("-inf"))
        x = x.to(tl.float32)
        kept = (token < V) & (x >= tl.load(thresholds + at)) & (x > float("-inf"))
        weight = tl.where(kept, tl.exp((x - top) / heat), 0.0)
        last = tl.max(tl.where(weight > 0, tl.arange(0, CHUNK), 0), 0)
        inside = tl.sum((tl.cumsum(weight, 0) <= rest).to(tl.int32), 0)
        drawn = found * CHUNK + tl.minimum(inside, last)
    else:
        best = tl.min(tl.where(real & (largest == top), chunk, CHUNKS_PAD), 0)
        drawn = tl.load(winners + at * chunks + tl.minimum(best, chunks - 1))
    tl.store(tokens + at, tl.minimum(drawn, V - 1).to(tl.int64))  # NaN wins every comparison


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits [R, V], any float dtype, contiguous -> token ids [R] int64.

    Of equal logits at a filter's edge all are kept. A row of NaN gives some token of the vocabulary.
    """
    rows, size = logits.shape
    chunks = triton.cdiv(size, CHUNK)
    device = logits.device
    thresholds = torch.empty(rows, dtype=torch.float32, device=device)
    maxima = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    sums, winners = torch.empty_like(maxima), torch.empty_like(maxima, dtype=torch.int32)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    b = batch
    _threshold[(rows,)](
        logits, b.temperature, b.top_k, b.top_p, b.min_p, thresholds,
        V=size, TILE=min(TILE, triton.next_power_of_2(size)), num_warps=16,
    )  # fmt: skip
    _weigh[(rows, chunks)](
        logits, b.temperature, thresholds, maxima, winners, sums, V=size, CHUNK=CHUNK, num_warps=4
    )
    _draw[(rows,)](
        logits, b.temperature, thresholds, maxima, winners, sums, b.seeds, b.positions, tokens,
        chunks, V=size, CHUNK=CHUNK, CHUNKS_PAD=triton.next_power_of_2(chunks), num_warps=4,
    )  # fmt: skip
    return tokens
