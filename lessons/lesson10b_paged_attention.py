"""Lesson 10b: paged attention, tile by tile.

Attention divides by the sum of the softmax, so it seems to need the scores of all keys first. For a
prompt of 4,096 tokens and 16 heads these are 1 GiB. An online softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867) needs only a tile of keys at a time, with three numbers: a running maximum m, a
sum l and a weighted sum of values acc. FlashAttention (Dao et al. 2022, arXiv:2205.14135) therefore
never stores all scores. The keys of a tile can be anywhere, if it is gathered through a block
table, which is paged attention (Kwon et al. 2023, arXiv:2309.06180):

    positions   [ 0 ... 127 | 128 ... 255 | 256 ... 383 | ]   tiles of 128 keys
    blocks        7 3 9 1 .   2 8 4 6 ...   of 16 slots, through the block table
    m, l, acc     ------> changed -------> changed -------> acc / l

The score of a key is its product with the query, divided by the square root of the head size.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lessons.lesson import decode_plan, make_llm, optional, prompt_plan, runner_of
from lessons.show import Questions, link, say, show_lines, show_source, show_table
from nanovllm.backends.gpu.kernels.configs import Tile
from nanovllm.models.attention import PlainAttention
from nanovllm.models.batch import ForwardBatch

KERNELS = "nanovllm.backends.gpu.kernels.attention"
BLOCK, TILE = 16, 128  # slots of a block, keys of a tile
SPLIT = 256  # keys of a split here; the engine's kernel splits into 64 and more
CONTEXT = 600  # tokens of the sequence that is attended to tile by tile
# After some keys: m [], their largest score, and the sums of exp(score - m): l [], and times v [D].
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


def make_step(contexts: list[int]) -> tuple[Tensor, Tensor, ForwardBatch, Tensor]:
    """Return a decode of random queries, with the KV of texts in blocks anywhere in the cache.

    These are q [S, H, D], the cache of a layer [2, blocks, K, B, D], the batch, and what the
    engine's plain attention computes [S, H, D].
    """
    torch.manual_seed(0)
    runner = runner_of(make_llm(attention_backend="sdpa", num_kv_cache_blocks=100))
    attention: Any = runner.attention
    attention.cache.fill_(torch.nan)  # What is not stored must not be read.
    counts = [-(-context // BLOCK) for context in contexts]
    tables = [table.tolist() for table in torch.split(torch.randperm(sum(counts)) + 1, counts)]
    prompts = [[5 + i % 90 for i in range(context - 1)] for context in contexts]
    for plan in (prompt_plan(prompts, tables), decode_plan(len(contexts))):
        runner.run(plan)()
    step = runner.rows.build(plan).forward_batch
    attention.prepare(step)
    q = torch.randn(len(contexts), runner.model.config.num_heads, runner.model.config.head_dim)
    return q, attention.cache[0], step, attention.attend(0, q, step).view_as(q)


def attend_by_kernel(q: Tensor, kv: Tensor, step: ForwardBatch, max_splits: int) -> Tensor:
    """Attend with the engine's kernel, on a GPU or in Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    order = step.context_lens.argsort(descending=True)
    tensors = [x.to(device) for x in (q, *kv, order, step.context_lens, step.block_tables)]
    out = torch.empty_like(tensors[0])
    tile = Tile(num_rows=16, num_keys=TILE, num_warps=4, num_stages=1)
    optional(KERNELS).attend_decode(*tensors, tile, max_splits, out)
    return out.cpu()


def run() -> None:
    q, kv, step, expected = make_step([CONTEXT])
    first_q, first_kv, first_expected = q[0, 0], kv[:, :, 0], expected[0, 0]  # of the first head
    table = step.block_tables[0].long()
    QUESTIONS.show(1)
    say(f"""One query attends to the keys of {CONTEXT} tokens in the first layer of the
        embedded model. They are in a paged cache with the block table {table[:6].tolist()} and so
        on. A tile gathers the slots of {TILE} positions. Each tile multiplies l and acc by the
        factor exp(old m - new m), then adds its sums of exp(score - m) and exp(score - m) v:""")
    (_, total, acc), rows = attend_tiles(first_q, paged_tiles(first_kv, table, 0, CONTEXT))
    show_table(("keys", "largest score", "m", "factor", "l", "acc[0]", "acc[1]"), rows)
    torch.testing.assert_close(acc / total, first_expected)
    say("acc / l is the attention that all scores at once give.")
    QUESTIONS.show(2)
    say("""On a GPU one program would do this while others are idle. Instead, a program computes
        each split of the context, which is flash decoding (Dao et al. 2023). Then the l and acc of
        all splits are rescaled to the largest m and added:""")
    splits = [(start, min(start + SPLIT, CONTEXT)) for start in range(0, CONTEXT, SPLIT)]
    parts = [attend_tiles(first_q, paged_tiles(first_kv, table, *split))[0] for split in splits]
    torch.testing.assert_close(merge(parts), first_expected)
    rows = []
    for (start, end), (m, total, acc) in zip(splits, parts, strict=True):
        numbers = (m, total, acc[0], torch.exp(m - max(m for m, *_ in parts)))
        rows.append([f"{start} to {end - 1}", *(f"{x:.3f}" for x in numbers)])
    show_table(("positions", "m", "l", "acc[0]", "factor in the merge"), rows)
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
        link(kernels._load_blocks.fn, "tl.load"),
        link(kernels._merge_splits.fn, "weights ="),
        link(PlainAttention.read_blocks, "index_select"),
    )
    say("""Build it: `python -m lessons build softmax`. On the ladder the kernels of the CPU have a
        rung: `python -m lessons ladder 10`.""")


QUESTIONS = Questions("""
    l and acc are sums of exp(score - m). A tile multiplies both by exp(old m - new m). All scores
    of the next tile are lower than m. By which factor does it multiply them?
    Answer: 1. m does not change, so the factor is exp(m - m) = 1: the tile only adds to both sums.
    Hint: The factor is exp(old m - new m). What is the new m of this tile?

    A GPU with 132 multiprocessors decodes one sequence with a long context and 8 KV heads. Why is
    the context split among several programs? (a) A program can read a limited number of blocks. (b)
    With a program for each KV head, most multiprocessors would be idle. (c) The sums would be too
    large for float32.
    Answer: b. The splits cost a merge, so they pay off if there are few sequences. With many
    sequences all multiprocessors have work without them.
    Hint: How many programs are there without splits, and how many can run at once?
""")
