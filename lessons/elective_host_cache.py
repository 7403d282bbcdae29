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

from lessons.lesson import ask, embedded_config, make_llm, shape_of
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, Trace
from nanovllm.loading.memory import num_weights
from nanovllm.models.qwen3 import Qwen3

A, B = "What is 12 + 30?\n", "Spell strawberry\n"
SLOTS, POOL = 4, 66  # slots of a block, blocks of the device
CHATS, TURNS, TURN = 4, 5, 40  # conversations, their turns, tokens that a turn adds
LINK, GPU = 25e9, 400e12  # bytes per second to host memory, FLOPs per second: a GPU on PCIe


def make(num_blocks: int, host_blocks: int) -> LLM:
    """Make an LLM with small blocks on the device and in host memory."""
    options = dict(block_size=SLOTS, num_kv_cache_blocks=num_blocks)
    swap_space = host_blocks * embedded_config().block_bytes(SLOTS, 4) / 2**30
    return make_llm(**options, swap_space=swap_space, attention_backend="sdpa")


def converse(llm: LLM) -> tuple[int, int]:
    """Run all conversations in turn. Returns the prompt tokens, and how many were computed."""
    tokens = computed = 0
    for turn in range(1, TURNS + 1):
        for chat in range(CHATS):
            prompt = [(chat + 3) * (i + 7) % 1000 for i in range(turn * TURN)]
            [output] = ask(llm, [prompt], max_tokens=1)
            tokens += len(prompt)
            computed += len(prompt) - output.num_cached_tokens
    return tokens, computed


def run() -> None:
    llm = make(4, 64)
    say(f"""A pool of 4 blocks of {SLOTS} slots runs A = {A!r}, then B = {B!r}, then A again.
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
    say("The host keeps its copy after a load, even while the block is in use.")
    for prompt in (B, A):
        ask(llm, [prompt], max_tokens=1)
    assert llm.stats()["host_saves"] - saves == int(QUESTIONS[0].answer)

    say(f"""Host memory saves work. {CHATS} conversations take turns. Each turn adds {TURN} tokens
        to its conversation. The last turn needs {CHATS * TURNS * TURN // SLOTS} blocks for all of
        them:""")
    rows: list[tuple[object, ...]] = []
    for blocks, host_blocks in ((4 * POOL, 0), (POOL, 0), (POOL, 4 * POOL)):
        chats = make(blocks, host_blocks)
        tokens, computed = converse(chats)
        moves = [chats.stats().get(name, 0) for name in ("host_saves", "host_loads")]
        rows.append((blocks, host_blocks, f"{tokens:,}", f"{computed:,}", *moves))
    head = ("blocks", "host blocks", "prompt tokens", "computed", "saved blocks", "loaded blocks")
    show_table(head, rows)
    QUESTIONS.show(2)
    say(f"""The copies take time. With {LINK / 1e9:g} GB per second between host and GPU, and
        {GPU / 1e12:g} TFLOPs per second, a token in bfloat16 takes, calculated:""")
    rows = []
    for name in ("qwen3-0.6b", "qwen3-14b"):
        config = shape_of(name)
        size, flops = config.block_bytes(1, 2), 2 * num_weights(Qwen3.on_meta(config))
        times = (f"{1e6 * size / LINK:.1f}", f"{1e6 * flops / GPU:.1f}")
        rows.append((name, f"{size:,}", f"{flops / 1e9:.1f}", *times))
    show_table(("model", "bytes", "GFLOPs", "us to load", "us to compute"), rows)
    say("""For the small model a load is slower than computing, unless the link to the host is
        faster. The engine does not compare the two: with swap_space it loads each block that the
        host has. On a CPU a larger KV cache does the same without copies.""")
    where = "features.memory.host_cache.blocks.HostCacheBlockManager"
    show_source(link(f"{where}._save"), link(f"{where}._load"))


QUESTIONS = Questions("""
    After step 3, B and A run once more, and the same blocks are evicted and loaded. How many blocks
    are saved then?
    Answer: 0. The host has a copy of each of them already, and the content of a block does not
    change.
    Hint: Is there a block that has no copy in the host's memory?

    A block can be loaded from the host, or its tokens can be computed again. For which model is
    loading worth more, Qwen3-0.6B or Qwen3-14B? (a) Qwen3-0.6B: its blocks are smaller, so copies
    are faster. (b) Qwen3-14B: it has more weights for each byte of KV, so computing a token costs
    more than copying it. (c) It makes no difference: both grow with the number of layers.
    Answer: b. From the small to the large model, the FLOPs of a token grow more than its bytes of
    KV.
    Hint: By which factor do the weights grow, and by which factor the bytes of a token?
""")
