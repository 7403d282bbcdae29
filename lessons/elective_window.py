"""Elective window: local attention in a paged cache.

In a layer with a window of W tokens a query attends to the last W tokens, itself included (Mistral,
arXiv:2310.06825; Gemma 3, arXiv:2503.19786). At position p, its first key is at max(0, p - W + 1).
Blocks of 4 slots and a window of 6:

    keys              0  1  2  3 | 4  5  6  7 | 8  9 10 11 | 12
    the query at 8    .  .  .  x | x  x  x  x | x          |     x: attended to
    the query at 12   .  .  .  . | .  .  .  x | x  x  x  x | x

A kernel begins with the block of the first key, and masks the keys before it: at 12, block 0 is not
read. So a decode reads at most W + B - 1 keys, however long the context is. Information still
travels further: in layer n - 1 each of these W tokens has seen W others. In Gemma 3 every sixth
layer has no window. This engine keeps the blocks behind the window, because all layers have the
same block table.
"""

from typing import Any

import torch

from lessons.lesson import make_llm, runner_of
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import SamplingParams
from nanovllm.models.attention import PlainAttention

WINDOW = 64
BLOCK_SIZE = 16
PROMPT = "".join(f"What is {i} + {i + 9}?\n" for i in range(20))
LAYERS = 5  # of the embedded model


def blocks_behind(position: int, window: int, block_size: int) -> int:
    """Return how many blocks neither this query nor a later one reads."""
    return max(0, position - window + 1) // block_size


def continue_without(kinds: list[str], is_cleared: bool) -> tuple[list[int], int]:
    """Decode after PROMPT. Return the tokens, and how many blocks behind the window had NaN."""
    slides = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds}
    options: dict[str, Any] = dict(attention_backend="sdpa", async_scheduling=False)
    options |= dict(block_size=BLOCK_SIZE, num_kv_cache_blocks=64, enable_prefix_caching=False)
    llm = make_llm(hf_overrides=slides, **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens, behind = list[int](), 0
    for new in llm.stream([PROMPT], params):
        tokens += new.token_ids
        if is_cleared and not behind:
            [seq] = llm.engine.scheduler.running
            behind = blocks_behind(seq.num_computed, WINDOW, BLOCK_SIZE)
            runner_of(llm).attention.cache[:, :, seq.block_table[:behind]] = torch.nan
    return tokens, behind


def run() -> None:
    QUESTIONS.show(1)
    say(f"What a decode reads in a layer with a window of 512, in blocks of {BLOCK_SIZE}:")
    rows = []
    for position in (100, 511, 512, 2_000, 8_000):
        behind = blocks_behind(position, 512, BLOCK_SIZE)
        keys = position + 1 - behind * BLOCK_SIZE
        rows.append(
            (f"{position:,}", f"{position + 1:,}", keys, position // BLOCK_SIZE + 1, behind)
        )
    show_table(("position", "keys without window", "with it", "blocks", "behind it"), rows)
    say(f"""Which blocks could be freed? Layers of the embedded model get a window of {WINDOW}, and
        it continues a prompt after NaN was written to the blocks behind it:""")
    found = []
    for name, num in (("all layers", LAYERS), ("all but the last one", LAYERS - 1)):
        kinds = ["sliding_attention"] * num + ["full_attention"] * (LAYERS - num)
        wanted, _ = continue_without(kinds, is_cleared=False)
        tokens, behind = continue_without(kinds, is_cleared=True)
        found.append((name, behind, "yes" if tokens == wanted else "no"))
    show_table(("layers with a window", "cleared blocks", "the same tokens"), found)
    say("""If all layers have a window, W / B + 2 blocks are enough for a request. With one full
        layer, each kind of layer needs a block table of its own, as in vLLM.""")
    QUESTIONS.show(2)
    show_source(link(PlainAttention.prepare, "first = "), link(PlainAttention.prepare, "mask = ("))


QUESTIONS = Questions("""
    A window of 512, blocks of 16. How many blocks are behind the window of a query at position
    8,000?
    Answer: 468. Its first key is at 8,000 - 512 + 1 = 7,489, in block 468. Blocks 0 to 467 end
    before it.
    Hint: What is the position of the first key, and which block has its slot?

    All layers have a window, and blocks behind it were freed. A new request has the same first
    1,000 tokens as one that has ended. Which blocks must a match in the prefix cache find?
    (a) All blocks of the 1,000 tokens.
    (b) The blocks of the last W - 1 of them.
    (c) None: windows cannot be matched.
    Answer: b. The window of the next token begins W - 1 tokens before it.
    Hint: Which keys does the first token after the match attend to?
""")

IN_VLLM = """`SlidingWindowManager` in `v1/core/single_type_kv_cache_manager.py` frees blocks
behind the window; `HybridKVCacheCoordinator` has a block table for each kind of layer."""
