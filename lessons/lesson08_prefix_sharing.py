"""Lesson 8: prefix sharing and eviction.

A chat sends its whole history with each message, and many requests begin with the same system
prompt. Until now each computes it again. If two prompts begin with the same tokens, the keys and
values of these tokens are the same (lesson 3), so both block tables can contain the same blocks:

    prompt A   [ t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9       ]   block table  1 2 3
    prompt B   [ t0 t1 t2 t3 | t4 t5 u6 u7 | u8          ]   block table  1 4 5
                 block 1: shared   blocks 4 and 5: B only, as t6 and u6 differ

The prefix cache finds a block by a hash, as in vLLM.
"""

from lessons.lesson import ask, make_llm
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, Trace
from nanovllm.engine.sequence import Sequence

PROMPTS = {"A": "What is 12 + 30?\n", "B": "What is 12 + 7?\n"}
PROMPTS |= {"C": "Sort 42, 7, 99\n", "D": "Spell garden\n"}


def run_prompts(llm: LLM, prompts: list[list[int]]) -> list[int]:
    """Run prompts in one batch -> how many tokens of each were in the prefix cache."""
    return [output.num_cached_tokens for output in ask(llm, prompts, max_tokens=1)]


def evict() -> list[tuple[object, ...]]:
    """Run prompts in a pool of 6 blocks. Returns how many tokens of each are cached after each."""
    llm = make_llm(block_size=4, num_kv_cache_blocks=6)
    ids = {name: llm.get_tokenizer().encode(text) for name, text in PROMPTS.items()}
    blocks = llm.engine.scheduler.block_manager
    rows = list[tuple[object, ...]]()
    for name in "ACAD":
        run_prompts(llm, [ids[name]])
        seqs = (Sequence("", 0, ids[n], len(ids[n]), 1024) for n in "ACD")
        rows.append((name, *(4 * len(blocks.match(seq)) for seq in seqs)))
    return rows


def run() -> None:
    llm = make_llm(block_size=4, num_kv_cache_blocks=32)
    encode, decode = llm.get_tokenizer().encode, llm.get_tokenizer().decode
    a, b = encode(PROMPTS["A"]), encode(PROMPTS["B"])
    say(f"""Prompts A, {PROMPTS["A"]!r}, and B, {PROMPTS["B"]!r}, begin with the same 6 tokens.
        Blocks have 4 slots. Below is the trace of their first step. Its columns free, cached and
        shared count blocks while the step runs: a request that ends in the step still has its
        blocks. A cached block is in the prefix cache, and no sequence owns it now.""")
    with Trace(llm) as trace:
        run_prompts(llm, [a, b])
    print(trace, end="\n\n")
    say("""A (request 0) and B share block 1: it is in both block tables, so its reference count is
        2. They can share it in the same step, because each layer stores all keys and values of a
        step before any query attends. B computes the other 2 of the same tokens itself: only
        full blocks are shared. Here a block that is not full has one owner, which still
        writes to it.""")
    QUESTIONS.show(1)
    say("""So each full block has a hash of its tokens and of all before them: block_hash =
        xxh3_128(parent_block_hash, token ids), where xxh3_128 is a hash function with a result of
        128 bits, and the parent is the block before it. The cache is a dictionary from hashes to
        blocks. A match compares the tokens too, as two hashes could be equal. Below are the first
        six digits of the hashes:""")
    manager = llm.engine.scheduler.block_manager
    rows = []
    for name, ids in (("A", a), ("B", b), ("A with another first token", [b[-1], *a[1:]])):
        parent = b""
        for i in (0, 4):
            digest = manager.hash_block(parent, ids[i : i + 4])
            texts = map(decode, ids[i : i + 4])
            rows.append((name, str([*texts]), parent.hex()[:6] or "none", digest.hex()[:6]))
            parent = digest
    show_table(("prompt", "tokens of a block", "parent_block_hash", "block_hash"), rows)
    QUESTIONS.show(2)
    found = run_prompts(llm, [a, b, a[:8]])
    say(f"""The full blocks of a finished request stay in the cache, and a last block that is not
        full is free at once. A second step runs A, B and a prompt of the first 8 tokens of A, and
        finds {found[0]} tokens of A, {found[1]} of B, and of the prompt of 8 tokens only
        {found[2]}.

        Cached blocks without an owner are kept until no block is free. Then the least recently used
        one is evicted. A pool of 6 blocks runs A, C, {PROMPTS["C"]!r}, A again, and D,
        {PROMPTS["D"]!r}. D needs 3 blocks, and 2 are free. A was used again, so the blocks of C
        are the least recently used. Of these the last is evicted, and the beginning of C stays,
        because a sequence releases its last block first. The table shows how many tokens of each
        prompt the next request would find in the cache:""")
    show_table(("after", "of A", "of C", "of D"), evict())
    show_source(
        link("engine.block_manager.BlockManager.match"),
        link("engine.block_manager.BlockManager.cache_full_blocks"),
        link("engine.block_manager.BlockManager.choose_victim"),
    )
    say("""Build it: `python -m lessons build prefix`, and then `python -m lessons build eviction`,
        whose rule has to find more tokens than the engine's; then m4, in your engine. On the ladder
        631 of 1,831 tokens are left to compute, with the token budget of lesson 6b: `python -m
        lessons ladder 8`.""")


QUESTIONS = Questions("""
    Two prompts differ in their first token only. Why can they share none of the later blocks, whose
    tokens are equal?
    (a) The tokens are at other positions.
    (b) The cache compares whole prompts.
    (c) Their keys and values are different.
    Answer: c. The keys and values of a token depend on all tokens before it. So equal tokens after
    different beginnings are different blocks.
    Hint: The positions are equal, and blocks are compared one by one. Which tokens do the keys and
    values of the fifth token depend on, in the second layer?

    A prompt of 8 tokens has run, and its two blocks of 4 slots are cached. The same prompt comes
    again. How many of its tokens are found in the cache?
    Answer: 4. The last token must be computed, because its logits give the first output token. It
    is in the second block, and only whole blocks are found.
    Hint: Which logits does the request need before it can sample its first token?
""")

IN_VLLM = """`KVCacheManager.get_computed_blocks` in `v1/core/kv_cache_manager.py` finds blocks, and
`BlockPool.cache_full_blocks` in `v1/core/block_pool.py` caches them. Their hash is SHA-256 by
default, so tokens are not compared; to compare them is nanovllm's own. It is also a hash of LoRA
adapters, images and `cache_salt`, which nanovllm's requests do not have. Free and cached blocks are
in one queue, from which `BlockPool.get_new_blocks` takes the next one and evicts what it holds."""
