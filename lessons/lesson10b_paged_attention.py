"""Lesson 10b: paged attention, tile by tile.

Attention divides by the sum of the softmax, so it seems to need the scores of all keys first. For a
prompt of 4,096 tokens and 16 heads these are 1 GiB in float32. An online softmax (Milakov and
Gimelshein 2018, arXiv:1805.02867) needs only a tile of keys at a time, with two numbers and a
vector: a running maximum m, a sum l, and a weighted sum of values acc. FlashAttention (Dao et al.
2022, arXiv:2205.14135) therefore never stores all scores. The keys of a tile can be anywhere, if it
is gathered through a block table, which is paged attention (Kwon et al. 2023, arXiv:2309.06180):

    positions   [ 0 ... 127 | 128 ... 255 | 256 ... 383 | ]   tiles of 128 keys
    blocks        7 3 9 1 .   2 8 4 6 ...   of 16 slots, through the block table
    m, l, acc     ------> changed -------> changed -------> acc / l

The score of a key is its product with the query, divided by the square root of the head size. l is
the sum of exp(score - m), and acc of exp(score - m) v, so m cancels in acc / l. It is there because
exp of a large score would overflow. When a tile has a larger score, m grows, and the sums so far
get the factor exp(old m - new m): exp(score - old m) exp(old m - new m) = exp(score - new m).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lessons.lesson import make_llm, optional, prompt_plan, runner_of
from lessons.show import Questions, link, say, show_lines, show_source, show_table

BLOCK = 16  # slots of a block
TILE = 128  # keys of a tile
CONTEXT = 600  # tokens that are attended to
SPLIT = 200  # keys of a split


def attend_tiles(q: Tensor, tiles: Iterable[Any]) -> tuple[list[Tensor], list[list[str]]]:
    """Return m [], l [] and acc [D] of q [D] after tiles of k and v [L, D], a row for each tile."""
    m = torch.tensor(-torch.inf)
    total = torch.tensor(0.0)
    acc = torch.zeros(len(q))
    rows = []
    for k, v in tiles:
        scores = k @ q / len(q) ** 0.5
        new_m = torch.maximum(m, scores.max())
        weights = torch.exp(scores - new_m)
        factor = torch.exp(m - new_m)
        total = total * factor + weights.sum()
        acc = acc * factor + weights @ v
        m = new_m
        numbers = (scores.max(), m, factor, total, *acc[:2])
        rows.append([str(len(k)), *(f"{x:.3f}" for x in numbers)])
    return [m, total, acc], rows


def paged_tiles(kv: Tensor, block_table: Tensor, start: int, end: int) -> Iterator[Tensor]:
    """Yield tiles of the positions [start, end). kv [2, blocks, B, D]: one KV head of a layer."""
    for first in range(start, end, TILE):
        position = torch.arange(first, min(first + TILE, end))
        yield kv[:, block_table[position // BLOCK], position % BLOCK]  # [2, TILE, D]


def make_cache() -> tuple[Tensor, Tensor]:
    """Run the model over a text -> the KV of a head [2, blocks, B, D], and the block table."""
    runner: Any = runner_of(make_llm(attention_backend="sdpa", num_kv_cache_blocks=100))
    table = torch.randperm(100)[: -(-CONTEXT // BLOCK)] + 1
    prompt = [5 + i % 90 for i in range(CONTEXT)]
    runner.run(prompt_plan([prompt], [table.tolist()]))()
    return runner.attention.cache[0][:, :, 0], table


def run() -> None:
    torch.manual_seed(0)
    kv, table = make_cache()
    q = torch.randn(kv.shape[-1])
    QUESTIONS.show(1)
    say(f"""A query attends to the keys of {CONTEXT} tokens in the first layer of the embedded
        model. They are in a paged cache with the block table {table[:6].tolist()} and so on. A tile
        gathers the slots of {TILE} positions. Each tile multiplies l and acc by the factor, then
        adds the sums of its keys. Before the first tile m is -inf, so its factor is 0:""")
    (_, total, acc), rows = attend_tiles(q, paged_tiles(kv, table, 0, CONTEXT))
    show_table(("keys", "largest score", "m", "factor", "l", "acc[0]", "acc[1]"), rows)
    k, v = torch.cat([*paged_tiles(kv, table, 0, CONTEXT)], dim=1)
    expected = (k @ q / len(q) ** 0.5).softmax(0) @ v
    torch.testing.assert_close(acc / total, expected)
    say(f"""acc / l begins with {acc[0]:.3f} / {total:.3f} = {acc[0] / total:.3f}. The softmax of
        all scores at once gives {expected[0]:.3f}.""")
    QUESTIONS.show(2)
    say("""If one program did all of this, most multiprocessors of a GPU would be idle. Instead, a
        program computes each split of the context, which is flash decoding (Dao et al. 2023). Then
        the l and acc of all splits are multiplied by exp(m - the largest m) and added:""")
    splits = [(start, start + SPLIT) for start in range(0, CONTEXT, SPLIT)]
    states = [attend_tiles(q, paged_tiles(kv, table, *split))[0] for split in splits]
    largest, totals, accs = map(torch.stack, zip(*states, strict=True))
    factors = torch.exp(largest - largest.max())
    torch.testing.assert_close(factors @ accs / (factors @ totals), expected)
    columns = zip(splits, largest, totals, accs[:, 0], factors, strict=True)
    rows = [[f"{a} to {b - 1}", *(f"{x:.3f}" for x in numbers)] for (a, b), *numbers in columns]
    show_table(("positions", "m", "l", "acc[0]", "factor"), rows)
    kernels = optional("nanovllm.backends.gpu.kernels.attention")
    if kernels is None:
        say("Triton is not installed (it exists for Linux only), so its kernel is not shown.")
        return
    say("""The lines of the engine's Triton kernel that do what the first table shows: row_max is m,
        row_sum is l, correction is the factor. A tile has M queries, so m and l are a number for
        each row, and a mask hides keys after the query of a row. `scale` contains log2(e), so that
        exp2, one instruction, takes the place of exp:""")
    show_lines(kernels._attend_tile.fn, "scores = tl.dot", "return acc")
    say("""A program stores two things of its split: the result acc / l, and lse = m + log2 l, the
        logarithm of its sum of exp2(score). exp2(lse) is l exp2(m), so exp2(lse) times the result
        is exp2(m) acc: the sum as if no maximum had been subtracted, which all splits share. The
        merge is the mean of the results, weighted with exp2(lse). The largest lse is subtracted
        first, so that no exp2 overflows:""")
    show_source(link(kernels._merge_splits.fn, "weights ="))
    say("Build it: `python -m lessons build softmax`.")


QUESTIONS = Questions("""
    A tile multiplies l and acc by exp(old m - new m). All scores of the next tile are lower than m.
    By which factor does it multiply them?
    Answer: 1. m does not change, so the factor is exp(m - m) = 1: the tile only adds to both sums.
    Hint: The factor is exp(old m - new m). What is the new m of this tile?

    A GPU with 132 multiprocessors decodes one sequence with a long context and 8 KV heads. Why is
    the context split among several programs?
    (a) All of its scores do not fit into one program.
    (b) Most of the GPU would be idle without splits.
    (c) The sum would be too large for one float32.
    Answer: b. There would be one program for each KV head, which is 8. The splits cost a merge, so
    they pay off if there are few sequences. With many sequences all multiprocessors have work
    without them.
    Hint: How many programs are there without splits, and how many can run at once?
""")

IN_VLLM = """`kernel_unified_attention` in `v1/attention/ops/triton_unified_attention.py`, and
`reduce_segments` there for the merge. A split is called a segment. A context has 16 of them, if the
step only decodes few requests, and otherwise one."""
