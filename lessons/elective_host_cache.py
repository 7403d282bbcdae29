"""Elective host_cache: a cache in host memory.

When no block is free, the prefix cache evicts one, and its keys and values are lost (lesson 8). The
next turn of a chat of 4,000 tokens then computes all 4,000 again, although the host has memory to
spare. With swap_space (GiB) blocks are saved to host memory first, and loaded when a request needs
them again: after a preemption, or in the next turn of a conversation. This is the swapping of
PagedAttention (Kwon et al. 2023, arXiv:2309.06180, section 4.5), block by block.

    device   owned --release--> cached --eviction--> holds other tokens
               ^                   |
               | load              | save, unless the host has a copy
    host       +------------ host block --eviction--> lost

Loading a block is useful only if the copy takes less time than computing its tokens again.
"""

from lessons.lesson import ask, make_llm, shape_of
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import Trace
from nanovllm.loading.memory import num_weights
from nanovllm.models.qwen3 import Qwen3

A, B = "What is 12 + 30?\n", "Spell strawberry\n"
SLOTS = 4
BLOCKS = 4
# A GPU on PCIe.
LINK = 25e9  # bytes per second to host memory
GPU = 400e12  # FLOPs per second


def run() -> None:
    options = dict(block_size=SLOTS, num_kv_cache_blocks=BLOCKS, attention_backend="sdpa")
    llm = make_llm(**options, swap_space=0.002)  # GiB of host memory
    say(f"""A pool of {BLOCKS} blocks of {SLOTS} slots runs A = {A!r}, then B = {B!r}, then A again.
        The blocks of A are evicted for B, and loaded again in step 3:""")
    with Trace(llm) as trace:
        for prompt in (A, B, A):
            ask(llm, [prompt], max_tokens=1)
    print(trace, end="\n\n")
    say("""The number of a block is its place in the cache, and does not depend on its content. In
        step 3, blocks 1 and 2 appear twice. First B's tokens are evicted from them; then A's
        tokens, found in host memory, are loaded into them.""")
    saves = llm.stats()["host_saves"]
    QUESTIONS.show(1)
    for prompt in (B, A):
        ask(llm, [prompt], max_tokens=1)
    say(f"""After B and A, {llm.stats()["host_saves"] - saves} more blocks are saved. The host keeps
        its copy after a load, even while the block is in use.""")
    QUESTIONS.show(2)
    say(f"""The copies take time. With {LINK / 1e9:g} GB per second between host and GPU, and
        {GPU / 1e12:g} TFLOPs per second, a token in bfloat16 takes, calculated:""")
    rows = []
    for name in ("qwen3-0.6b", "qwen3-14b"):
        config = shape_of(name)
        size = config.block_bytes(1, 2)
        flops = 2 * num_weights(Qwen3.on_meta(config))
        times = (f"{1e6 * size / LINK:.1f}", f"{1e6 * flops / GPU:.1f}")
        rows.append((name, f"{size:,}", f"{flops / 1e9:.1f}", *times))
    show_table(("model", "bytes", "GFLOPs", "us to load", "us to compute"), rows)
    say("""For the small model a load is slower than computing, unless the link to the host is
        faster. The engine does not compare the two: with swap_space it loads each block that the
        host has.""")
    where = "features.kv.host_cache.host_blocks.HostCacheBlockManager"
    show_source(link(f"{where}._save"), link(f"{where}._load"))


QUESTIONS = Questions("""
    After step 3, B and A run once more, and the same blocks are evicted and loaded. How many blocks
    are saved then?
    Answer: 0. The host has a copy of each of them already, and the content of a block does not
    change.
    Hint: Is there a block that has no copy in the host's memory?

    A block can be loaded from the host, or its tokens can be computed again. For which model is
    loading worth more, Qwen3-0.6B or Qwen3-14B?
    (a) Qwen3-0.6B: a block of it has fewer bytes.
    (b) Qwen3-14B: its tokens cost more to compute.
    (c) Neither: both costs grow with the number of layers.
    Answer: b. It has more weights for each byte of KV: from the small to the large model, the FLOPs
    of a token grow more than its bytes of KV.
    Hint: By which factor do the weights grow, and by which factor the bytes of a token?
""")

IN_VLLM = """`CPUOffloadingManager` in `v1/kv_offload/cpu/manager.py`. Blocks are stored when they
are computed, and not when they are evicted, by an `OffloadingConnector`, whose interface also moves
KV between machines. The option is called `kv_offloading_size`."""
