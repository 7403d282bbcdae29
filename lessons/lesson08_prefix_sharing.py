"""Lesson 8: prefix sharing and eviction.

A chat sends its whole history with each message, and many requests begin with the same system
prompt. Until now each computes it again. If two prompts begin with the same tokens, the keys and
values of these tokens are the same (lesson 3), so both block tables can contain the same blocks:

    prompt A   [ t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9       ]   block table  1 2 3
    prompt B   [ t0 t1 t2 t3 | t4 t5 u6 u7 | u8          ]   block table  1 4 5
                 block 1: shared   blocks 4 and 5: B only, as t6 and u6 differ

The prefix cache finds a block by a hash, as in vLLM; SGLang (Zheng et al. 2023, arXiv:2312.07104)
uses a tree.
"""

from itertools import pairwise

from lessons.lesson import GREEDY, ask, make_llm
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, SamplingParams, Trace
from nanovllm.engine.sequence import Sequence

A, B, C, D = "What is 12 + 30?\n", "What is 12 + 7?\n", "Sort 42, 7, 99\n", "Spell garden\n"
PROMPTS = {"A": A, "B": B, "C": C, "D": D}


def new_sequence(ids: list[int]) -> Sequence:
    return Sequence("", 0, ids, len(ids), 1024, frozenset(), GREEDY)


def run_prompts(llm: LLM, prompts: list[list[int]]) -> list[int]:
    """Run prompts in one batch -> how many tokens of each were in the prefix cache."""
    return [output.num_cached_tokens for output in ask(llm, prompts, max_tokens=1)]


def share_blocks(llm: LLM) -> dict[int, int]:
    """Run a step of two prompts, print its trace, and return the reference counts of the blocks."""
    engine = llm.engine
    with Trace(llm) as trace:
        for name in "AB":
            params = SamplingParams(temperature=0, max_tokens=2)
            engine.add_request(PROMPTS[name], params, name)
        engine.step()
    print(trace, end="\n\n")
    blocks = engine.scheduler.block_manager.blocks
    counts = {b: blocks[b].ref_count for s in engine.scheduler.running for b in s.block_table}
    while engine.has_unfinished_requests():
        engine.step()
    return dict(sorted(counts.items()))


def hash_chains(llm: LLM) -> list[tuple[str, str, str, str]]:
    """Run three prompts. Returns their blocks: name, tokens, parent_block_hash, block_hash.

    Of each hash, the first six of 32 hexadecimal digits.
    """
    tokenizer, rows = llm.get_tokenizer(), []
    a, b = tokenizer.encode(A), tokenizer.encode(B)
    other = tokenizer.encode("Sort") + a[1:]
    for name, ids in (("A", a), ("B", b), ("A with another first token", other)):
        run_prompts(llm, [ids])
        cached = llm.engine.scheduler.block_manager.match(new_sequence([*ids, 0]))
        hashes = ["none", *(block.block_hash.hex()[:6] for block in cached), "not full"]
        for i, pair in enumerate(pairwise(hashes)):
            texts = [tokenizer.decode([token]) for token in ids[4 * i : 4 * i + 4]]
            rows.append((name, str(texts), *pair))
    return rows


def evict() -> list[tuple[str, int, int, int]]:
    """Run prompts in a pool of 6 blocks. Returns how many tokens of each are cached after each."""
    llm = make_llm(block_size=4, num_kv_cache_blocks=6)
    ids = {name: llm.get_tokenizer().encode(text) for name, text in PROMPTS.items()}
    blocks, rows = llm.engine.scheduler.block_manager, []
    for name in "ACAD":
        run_prompts(llm, [ids[name]])
        a, c, d = (4 * len(blocks.match(new_sequence(ids[n]))) for n in "ACD")
        rows.append((name, a, c, d))
    return rows


def run() -> None:
    llm = make_llm(block_size=4, num_kv_cache_blocks=32)
    a, b = llm.get_tokenizer().encode(A), llm.get_tokenizer().encode(B)
    same = next(i for i in range(len(b)) if a[i] != b[i])
    print(*(f"{name} = {text!r}" for name, text in PROMPTS.items()), sep="\n", end="\n\n")
    say(f"""Prompts A and B begin with the same {same} tokens. Blocks have 4 slots. Below is the
        trace of their first step. Its columns free, cached and shared count blocks. The column
        cached counts only those blocks of the prefix cache that no sequence owns now. docs/trace.md
        explains the others.""")
    show_table(("block", "ref_count"), share_blocks(llm).items())
    say(f"""A and B share one block, so its reference count is 2. They can share it in the same
        step, because each layer stores all keys and values of a step before any query attends. B
        computes the other {same - 4} of the same tokens itself, because only full blocks are
        shared: the owner of a block that is not full will write into it.""")
    QUESTIONS.show(1)
    say("""So each full block has a hash of its tokens and of all before them: block_hash =
        xxh3_128(parent_block_hash, token ids), where the parent is the block before it. Below are
        the first six digits of the hashes. The same tokens after another beginning have another
        hash:""")
    chains = hash_chains(make_llm(block_size=4, num_kv_cache_blocks=32))
    show_table(("prompt", "tokens of a block", "parent_block_hash", "block_hash"), chains)
    say("""The cache is a dictionary from hashes to blocks. Two blocks with different tokens could
        have the same hash. With 128 bits this is very unlikely, but a match compares the tokens
        too.""")
    QUESTIONS.show(2)
    llm.reset_prefix_cache()
    runs = [run_prompts(llm, [a, b, a[:8]]) for _ in range(2)]
    say(f"""Finished requests leave their full blocks in the cache. At least one token of a prompt
        is computed, because its logits give the first output token. When A, B and the first 8
        tokens of A are run twice, the second run finds {runs[1][0]} tokens of A, {runs[1][1]} of B,
        and of the prompt of 8 tokens only {runs[1][2]}.""")
    say("""Cached blocks without an owner are kept until no block is free. Then the least recently
        used one is evicted. A pool of 6 blocks runs A, C, A again, and D. D needs 3 blocks, and 2
        are free. The last block of C is evicted. The beginning of C stays, because a sequence
        releases its last block first. The table shows how many tokens of each prompt the next
        request would find in the cache:""")
    show_table(("after", "of A", "of C", "of D"), evict())
    say("""A hash depends on tokens and not on the process. So save_prefix_cache can write the
        blocks to a file, and another process finds them. The file is refused if the weights, the
        dtype or the block size differ.""")
    show_source(
        link("engine.block_manager.BlockManager.match"),
        link("engine.block_manager.BlockManager.choose_victim"),
        link("features.memory.disk_cache.restore", "yield (block"),
    )
    say("""Build it: `python -m lessons build prefix`, and then `python -m lessons build eviction`,
        whose rule has to find more tokens than the engine's own. On the ladder, prefix sharing
        leaves a third of the tokens to compute: `python -m lessons ladder 8`.""")


QUESTIONS = Questions("""
    Two prompts differ in their first token only. Why can they share none of the later blocks, whose
    tokens are equal? (a) The cache compares whole prompts. (b) Their positions differ. (c) The keys
    and values of a token depend on all tokens before it, so they differ.
    Answer: c. Equal tokens after different beginnings are different blocks.
    Hint: Which tokens do the keys and values of the fifth token depend on, in the second layer?

    A prompt of 8 tokens has run, and its two blocks of 4 slots are cached. The same prompt comes
    again. How many of its tokens are found in the cache?
    Answer: 4. The last token must be computed, because its logits give the first output token. It
    is in the second block, and only whole blocks are found.
    Hint: Which logits does the request need before it can sample its first token?
""")
