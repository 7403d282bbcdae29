"""Lesson 10b: paged attention, tile by tile.

Attention divides by the sum of the softmax, so it seems to need the scores of all keys first. For a
prompt of 4,096 tokens and 16 heads these are 1 GiB. An online softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867) needs only a tile of keys at a time (lesson 10a). It has a running maximum m, a
sum l and a weighted sum of values acc, and rescales both sums when m rises. FlashAttention (Dao et
al. 2022, arXiv:2205.14135) therefore never stores all scores. A tile can be gathered through a
block table, which is paged attention (Kwon et al. 2023, arXiv:2309.06180), and several programs can
share one context, which is flash decoding (Dao et al. 2023).

    positions   [ 0 ... 127 | 128 ... 255 | 256 ... 383 | ]   tiles of 128 keys
    blocks        7 3 9 1 .   2 8 4 6 ...   of 16 slots, through the block table
    m, l, acc     ------> rescaled ------> rescaled ------> acc / l

The score of a key is its product with the query, divided by the square root of the head size.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lessons.lesson import decode_plan, embedded_config, optional, prompt_plan
from lessons.pictures import show_formula, show_lanes
from lessons.show import Questions, link, say, show_lines, show_source, show_table
from nanovllm.backends.gpu.kernels.configs import Tile
from nanovllm.models.attention import PlainAttention
from nanovllm.models.batch import ForwardBatch
from nanovllm.runner.rows import Rows

KERNELS = "nanovllm.backends.gpu.kernels.attention"
CPU = torch.device("cpu")
BLOCK, TILE = 16, 128  # slots of a block, keys of a tile
SPLIT = 256  # keys of a split here; the engine's kernel splits into 64 and more
CONTEXT = 600  # tokens of the sequence that is attended to tile by tile
# The state of an online softmax after some keys: m [], their largest score; l [], the sum of
# exp(score - m); acc [D], the sum of exp(score - m) * value.
Partial: TypeAlias = tuple[Tensor, Tensor, Tensor]


def attend_tiles(q: Tensor, tiles: Iterable[Any]) -> tuple[Partial, list[list[str]]]:
    """Return the state of q [D] after tiles of k and v [L, D], and a table of the tiles."""
    m, total, acc, rows = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros(len(q)), []
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
    return (m, total, acc), rows


def merge(parts: list[Partial]) -> Tensor:
    """Return the attention over the keys of all parts, rescaled to the largest m."""
    m, total, acc = (torch.stack(values) for values in zip(*parts, strict=True))
    factors = torch.exp(m - m.max())
    return factors @ acc / (factors @ total)


def paged_tiles(kv: Tensor, block_table: Tensor, start: int, end: int) -> Iterator[Tensor]:
    """Yield tiles of the positions [start, end). kv [2, blocks, B, D]: one KV head of a layer."""
    for first in range(start, end, TILE):
        position = torch.arange(first, min(first + TILE, end))
        yield kv[:, block_table[position // BLOCK], position % BLOCK]  # [2, TILE, D]


def make_steps(contexts: list[int]) -> tuple[ForwardBatch, ForwardBatch]:
    """Return a step that computes all tokens but the last of each sequence, and the next decode.

    The runner's Rows build both. The blocks of a sequence are anywhere in the cache.
    """
    torch.manual_seed(0)
    counts = [-(-context // BLOCK) for context in contexts]
    tables = torch.split(torch.randperm(sum(counts)) + 1, counts)
    rows = Rows(len(contexts), max(counts), BLOCK, CPU)
    prompts = [[0] * (context - 1) for context in contexts]
    batches = []
    for plan in (prompt_plan(prompts, [t.tolist() for t in tables]), decode_plan(len(contexts))):
        rows.apply(plan)
        batches.append(rows.build(plan).forward_batch)
    return batches[0], batches[1]


def attend_by_kernel(q: Tensor, kv: Tensor, step: ForwardBatch, max_splits: int) -> Tensor:
    """Attend with the engine's kernel, on a GPU or in Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    order = step.context_lens.argsort(descending=True)
    tensors = [x.to(device) for x in (q, *kv, order, step.context_lens, step.block_tables)]
    out = torch.empty_like(tensors[0])
    tile = Tile(num_rows=16, num_keys=TILE, num_warps=4, num_stages=1)
    optional(KERNELS).attend_decode(*tensors, tile, max_splits, out)
    return out.cpu()


def show_splits(q: Tensor, kv: Tensor, table: Tensor, expected: Tensor) -> None:
    """Attend to each split of the context alone, print the states, and merge the splits."""
    splits = [(start, min(start + SPLIT, CONTEXT)) for start in range(0, CONTEXT, SPLIT)]
    parts = [attend_tiles(q, paged_tiles(kv, table, *split))[0] for split in splits]
    torch.testing.assert_close(merge(parts), expected)
    rows = []
    for (start, end), (m, total, acc) in zip(splits, parts, strict=True):
        numbers = (m, total, acc[0], torch.exp(m - max(m for m, *_ in parts)))
        rows.append((f"{start} to {end - 1}", *(f"{x:.3f}" for x in numbers)))
    show_table(("positions", "m", "l", "acc[0]", "factor in the merge"), rows)
    starts = range(0, CONTEXT, TILE)
    tiles = [(start, min(TILE, CONTEXT - start), f"tile {i}") for i, start in enumerate(starts)]
    lanes = [
        ("blocks", [(p, BLOCK, str(int(table[p // BLOCK])), 0) for p in range(0, CONTEXT, BLOCK)]),
        ("one program", [(*tile, 1) for tile in tiles]),
        *(
            (f"program {i}", [(*tile, i + 2) for tile in tiles if start <= tile[0] < end])
            for i, (start, end) in enumerate(splits)
        ),
        ("merge", [(0, CONTEXT, "the sums of all splits, rescaled and added", 0)]),
    ]
    show_lanes("One program works through all tiles, or one for each split", lanes, "position")


def show_kernel(q: Tensor, kv: Tensor, step: ForwardBatch, expected: Tensor) -> None:
    """Compare the engine's kernel with `expected` [1, H, D], and print its lines."""
    kernels = optional(KERNELS)
    if kernels is None:
        say("Triton is not installed (it exists for Linux only), so its kernel does not run.")
        return
    for max_splits in (1, -(-CONTEXT // SPLIT)):
        torch.testing.assert_close(attend_by_kernel(q, kv, step, max_splits), expected)
    say("""The engine's Triton kernel does all this for all heads, here in Triton's interpreter if
        there is no GPU. It gives the same attention, in one split and in three. Its lines that do
        what the first table shows: row_max is m, row_sum is l, correction is the factor. Its scores
        are multiplied by log2(e), so that exp2, one instruction, takes the place of exp:""")
    show_lines(kernels._attend_tile.fn, "scores = tl.dot", "return acc")
    show_source(
        link(kernels._load_blocks.fn, "tl.load"), link(kernels._merge_splits.fn, "weights =")
    )


def run() -> None:
    config = embedded_config()
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    prefill, step = make_steps([CONTEXT])
    q, k, v = (torch.randn(n, h, dim) for n, h in ((1, heads), *[(CONTEXT, kv_heads)] * 2))
    k *= torch.linspace(0.3, 1.5, CONTEXT)[:, None, None]  # Later scores are larger, so m rises.
    attention = PlainAttention(config, CONTEXT // BLOCK + 2, BLOCK, torch.float32, CPU)
    attention.cache.fill_(torch.nan)  # What is not stored must not be read.
    attention.store(0, k[:-1], v[:-1], prefill)
    attention.store(0, k[-1:], v[-1:], step)
    attention.prepare(step)
    expected = attention.attend(0, q, step).view_as(q)
    first_q, first_expected = q[0, 0], expected[0, 0]  # of the first head
    kv, table = attention.cache[0], step.block_tables[0].long()

    QUESTIONS.show(1)
    say("With the score s of a key and its value v, each tile changes m, l and acc:")
    show_formula(
        "m' = max(m, s)   l' = l exp(m - m') + sum exp(s - m')   "
        "acc' = acc exp(m - m') + sum exp(s - m') v",
        r"m' = \max(m, \max_i s_i) \qquad l' = l\,e^{m - m'} + \sum_i e^{s_i - m'} \qquad "
        r"acc' = acc\,e^{m - m'} + \sum_i e^{s_i - m'} v_i",
    )
    say(f"""One query attends to a context of {CONTEXT} random keys, with the sizes of the embedded
        model. They are in a paged cache, [layers, 2, blocks, K, B, D] =
        {list(attention.cache.shape)}, with the block table {table[:6].tolist()} and so on. A tile
        gathers the slots of {TILE} positions. When m rises, l and acc are multiplied by the factor
        exp(old m - new m):""")
    (_, total, acc), rows = attend_tiles(first_q, paged_tiles(kv[:, :, 0], table, 0, CONTEXT))
    show_table(("keys", "largest score", "m", "factor", "l", "acc[0]", "acc[1]"), rows)
    torch.testing.assert_close(acc / total, first_expected)
    say("acc / l is the attention that all scores at once give.")
    QUESTIONS.show(2)
    say("""On a GPU one program would do this while others are idle. Instead, a program computes
        each split of the context. Then the l and acc of all splits are rescaled to the largest m
        and added:""")
    show_splits(first_q, kv[:, :, 0], table, first_expected)
    show_kernel(q, kv, step, expected)
    say(f"""This saves memory. All float32 scores of a prompt of 4,096 tokens and 16 heads would
        take {16 * 4096 * 4096 * 4 / 2**20:,.0f} MiB. A program has the scores of one tile only.""")
    show_source(link(PlainAttention.read_blocks, "index_select"))
    say("Build it: `python -m lessons build softmax`.")


QUESTIONS = Questions("""
    All scores of a tile are lower than the running maximum. By which factor does this tile rescale
    l and acc?
    Answer: 1. m does not change, so the factor is exp(m - m) = 1: the tile only adds to both sums.
    Hint: The factor is exp(old m - new m). What is the new m of this tile?

    A GPU with 132 multiprocessors decodes one sequence with a long context and 8 KV heads. Why is
    the context split among several programs?
    (a) A program can read a limited number of blocks.
    (b) With a program for each KV head, most multiprocessors would be idle.
    (c) The sums would be too large for float32.
    Answer: b. The splits cost a merge, so they pay off if there are few sequences. With many
    sequences all multiprocessors have work without them.
    Hint: How many programs are there without splits, and how many can run at once?
""")
