"""The kernels one by one, against the card's own copy bandwidth and matmul rate.

    decode   one query a sequence: bound by reading K and V; GB/s of what has to be read
    prefill  a whole prompt, causal: bound by arithmetic; TFLOP/s of what has to be computed
    others   what stands between: GB/s of what is read and written

Every call is recorded in a graph and the graph is replayed, so that launching costs nothing. The calls
of a graph go through inputs that together hold several times what the L2 cache does. Beside attention
stands torch's scaled_dot_product_attention on the same lengths, contiguous: it has no block table.
"""

from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.runner.batch import SamplingBatch

BEYOND_L2 = 512 << 20  # bytes
HEADS, KV_HEADS, DIM, BLOCK = 16, 8, 128, 16  # Qwen3-0.6B's
DTYPE = torch.bfloat16
DEVICE = "cuda"


def main() -> int:
    if not torch.cuda.is_available():
        raise ValueError(
            "--kernels times Triton's kernels on a GPU, and torch finds none; on a CPU take --step"
        )
    copy, matmul = rates()
    print(
        f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s, bf16 matmul {matmul / 1e12:.0f} "
        f"TFLOP/s; {HEADS} query and {KV_HEADS} KV heads of {DIM}, bf16, blocks of {BLOCK}"
    )
    print(f"\n{'decode':24} {'us':>9} {'GB/s':>7} {'of copy':>8} {'torch SDPA us':>14}")
    for batch in (1, 8, 64, 256):
        for context in (128, 1024, 8192, 32_768):
            if 2.5 * kv_bytes(batch, context) > torch.cuda.mem_get_info()[0]:
                print(f"{batch:5} x {context:6} tokens            - (more than this card holds)")
                continue
            ours, theirs = decode(batch, context)
            speed = kv_bytes(batch, context) / ours
            beside = "-" if theirs is None else f"{theirs * 1e6:.1f}"
            print(
                f"{batch:5} x {context:6} tokens    {ours * 1e6:9.1f} {speed / 1e9:7.0f} "
                f"{speed / copy:8.0%} {beside:>14}"
            )
    print(f"\n{'prefill':24} {'us':>9} {'TFLOP/s':>7} {'of matmul':>9} {'torch SDPA us':>14}")
    for length in (1024, 2048, 4096, 8192, 16_384):
        ours, theirs = prefill(length)
        speed = 2 * HEADS * DIM * length * (length + 1) / ours
        print(
            f"{length:14} tokens    {ours * 1e6:9.1f} {speed / 1e12:7.0f} {speed / matmul:9.0%} "
            f"{theirs * 1e6:14.1f}"
        )
    print(f"\n{'256 rows':24} {'us':>9} {'GB/s':>7} {'of copy':>8}")
    for name, (seconds, moved) in others(256).items():
        speed = moved / seconds
        print(f"{name:24} {seconds * 1e6:9.1f} {speed / 1e9:7.0f} {speed / copy:8.0%}")
    return 0


def seconds_of(calls: list[Callable[[], object]], repeats: int = 15) -> float:
    """Seconds of one call: the median over replays of a graph of all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    # All are queued before any is waited for: the card is never idle between them.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3 / len(calls)


def rates() -> tuple[float, float]:
    """(bytes a second that a copy reads and writes, FLOPs a second of a bf16 product)."""
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    copy = 2 * (1 << 30) / seconds_of([lambda: target.copy_(source)] * 2)
    a, b = (torch.randn(8192, 8192, device=DEVICE).to(DTYPE) for _ in range(2))
    return copy, 2 * 8192**3 / seconds_of([lambda: a @ b] * 4)


def number(bytes_each: int) -> int:
    """How many inputs of a size it takes to be beyond the L2 cache."""
    return max(1, min(1024, -(-BEYOND_L2 // bytes_each)))


def kv_bytes(batch: int, context: int) -> int:
    return 2 * batch * context * KV_HEADS * DIM * DTYPE.itemsize


def decode(batch: int, context: int) -> tuple[float, float | None]:
    """Seconds of the paged kernel and of SDPA; None where its copy does not fit beside."""
    from nanovllm.kernels import attention
    from nanovllm.kernels.configs import Card, decode_tile

    card = Card.of(torch.device(DEVICE))
    tile = decode_tile(card, DIM, DTYPE)
    splits = attention.num_splits(batch, KV_HEADS, tile.resident * card.processors)
    per_sequence = context // BLOCK
    blocks = batch * per_sequence
    copies = number(kv_bytes(batch, context))
    shape = (copies, blocks + 1, KV_HEADS, BLOCK, DIM)
    k, v = (torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(2))
    order = torch.randperm(blocks, device=DEVICE).int() + 1
    tables = order.view(batch, per_sequence)
    lens = torch.full((batch,), context, device=DEVICE)
    q = torch.randn(batch, HEADS, DIM, dtype=DTYPE, device=DEVICE)

    out = torch.empty_like(q)

    def paged(i: int) -> None:
        attention.attend_decode(q, k[i], v[i], lens, tables, tile, splits, out)

    ours = seconds_of([lambda i=i: paged(i) for i in range(copies)])  # type: ignore[misc]

    def dense(i: int) -> Tensor:
        keys, values = (x[i, 1:].reshape(batch, KV_HEADS, context, DIM) for x in (k, v))
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)

    try:
        return ours, seconds_of([lambda i=i: dense(i) for i in range(copies)])  # type: ignore[misc]
    except torch.OutOfMemoryError:
        return ours, None


def prefill(length: int) -> tuple[float, float]:
    """Seconds of the paged kernel and of SDPA, causal, for one prompt."""
    from nanovllm.kernels import attention
    from nanovllm.kernels.configs import Card, prefill_tile

    tile = prefill_tile(Card.of(torch.device(DEVICE)), DIM, DTYPE)
    blocks = length // BLOCK
    shape = (blocks + 1, KV_HEADS, BLOCK, DIM)
    k, v = (torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(2))
    tables = torch.randperm(blocks, device=DEVICE).int()[None] + 1
    starts = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([length], device=DEVICE)
    q = torch.randn(length, HEADS, DIM, dtype=DTYPE, device=DEVICE)
    tiles = attention.query_tiles(starts, length, tile.rows // (HEADS // KV_HEADS))
    out = torch.empty_like(q)
    ours = seconds_of(
        [lambda: attention.attend(q, k, v, tiles, starts, lens, tables, tile, out)] * 4
    )
    queries = q.transpose(0, 1)[None].contiguous()
    keys, values = (x[1:].reshape(1, KV_HEADS, length, DIM) for x in (k, v))

    def dense() -> Tensor:
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )

    return ours, seconds_of([dense] * 4)


def others(rows: int) -> dict[str, tuple[float, int]]:
    """name -> (seconds, bytes that have to be moved), at Qwen3-0.6B's sizes."""
    from nanovllm.kernels import pointwise, sampling, store

    def data(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=DEVICE)

    hidden, ffn, vocab = 1024, 3072, 151_936
    width = (HEADS + 2 * KV_HEADS) * DIM
    n = number(rows * hidden * DTYPE.itemsize)
    x, residual, gates, qkv = (data(n, rows, w) for w in (hidden, hidden, 2 * ffn, width))
    weight, cache = data(hidden), data(2, rows, KV_HEADS, BLOCK, DIM)
    turn, slots = data(rows, 1, DIM), torch.randperm(rows * BLOCK, device=DEVICE)[:rows]
    logits = data(4, rows, vocab)
    ids, row = torch.arange(rows, device=DEVICE), torch.ones(rows, device=DEVICE)

    def batch(**filters: Tensor) -> SamplingBatch:
        off = dict(top_k=0 * ids, top_p=row, min_p=0 * row)
        return SamplingBatch(
            row * 0.6, **(off | filters), seeds=ids, positions=ids,
            all_greedy=False, any_top_k=True, any_top_p=True, any_min_p=True,
        )  # fmt: skip

    plain, filtered = batch(), batch(top_k=0 * ids + 50, top_p=0.95 * row)
    calls: dict[str, tuple[Callable[[int], object], int, int]] = {
        "add and RMSNorm": (
            lambda i: pointwise.add_rms_norm(x[i], residual[i], weight, 1e-6),
            n,
            4 * hidden,
        ),
        "SiLU and multiply": (lambda i: pointwise.silu_and_mul(gates[i]), n, 3 * ffn),
        "norm, rotary, KV store": (
            lambda i: store.rope_store(
                qkv[i], weight[:DIM], weight[:DIM], 1e-6, turn, turn, slots, cache[0], cache[1]
            ),
            n,
            2 * width,
        ),
        "sampler": (lambda i: sampling.sample(logits[i], plain), 4, vocab),
        "sampler, top-k 50, top-p": (
            lambda i: sampling.sample(logits[i], filtered),
            4,
            vocab,
        ),
    }
    return {
        name: (
            seconds_of([lambda i=i, call=call: call(i) for i in range(count)]),  # type: ignore[misc]
            rows * moved * DTYPE.itemsize,
        )
        for name, (call, count, moved) in calls.items()
    }
