"""Lesson 5: blocks, block tables, slots.

Lesson 3 reserved a slot, the place of one token's keys and values, for each token that a request
may ever have. The length of an answer is not known in advance, so most slots stay empty: a request
of 20 tokens that may have 256 wastes 236. A paged cache is divided into blocks of a few slots, and
a sequence takes a block when it needs one. Its block table says which block holds which of its
tokens. Paging is from PagedAttention (Kwon et al. 2023, arXiv:2309.06180).

A logical block is a part of a sequence, and a physical block is a part of the cache. No sequence
owns physical block 0, the null block. The sequence of the picture has blocks of 4 slots. Its token
t9, at position 9, is in the logical block 9 // 4 = 2, at the offset 9 % 4 = 1:

    tokens        [ t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9       ]   logical blocks
    block table   [      1      |      3      |      5      ]   physical blocks
    cache         [ null | t0-t3 |  ..  | t4-t7 |  ..  | t8 t9 ]
    block            0       1      2       3      4       5  t9: slot 5 * 4 + 1
"""

from lessons.lesson import GREEDY, Counters, ask, make_llm
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

PROMPT = "What is 12 + 30?\n"
SIZE = 4


def slots_of_a_sequence() -> list[int]:
    """Give a sequence blocks, print where its tokens are, and return the slots."""
    tokenizer = make_llm().get_tokenizer()
    ids: list[int] = tokenizer.encode(PROMPT)
    blocks = BlockManager(num_blocks=8, block_size=SIZE)
    rows = []
    other = Sequence("other", 0, [1, 2], 2, 8, frozenset(), GREEDY)
    seq = Sequence("this", 1, ids, len(ids), 32, frozenset(), GREEDY)
    for _ in range(blocks.num_needed(seq, len(ids))):
        blocks.append_block(seq)
        blocks.append_block(other)
    for p, token in enumerate(ids):
        block, offset = seq.block_table[p // SIZE], p % SIZE
        text = repr(tokenizer.decode([token]))
        slot = block * SIZE + offset
        rows.append((text, p, p // SIZE, block, offset, slot))
    print(f"block_table = {seq.block_table}; of another sequence: {other.block_table}\n")
    head = ("token", "position", "logical block: // 4", "physical block", "offset: % 4", "slot")
    show_table(head, rows)
    return [slot for *_, slot in rows]


def run() -> None:
    say("""A step takes the blocks for the tokens that it computes: at first for the prompt, and
        later one more each time the last block is full. To show blocks that are not side by side,
        two sequences here take blocks of 4 slots in turn. Some steps are filled up with tokens that
        belong to no sequence (lesson 11b): their keys and values go to the null block.""")
    QUESTIONS.show(1)
    slots_of_a_sequence()
    QUESTIONS.show(2)
    say("""Attention reads through the block table (lesson 10b), so any free block will do. Paging
        saves memory. The next table compares two caches of 1,024 slots. In the first a block has
        256 slots, which is contiguous memory for a whole request. In the second a block has 16, and
        a request begins when there are free blocks for its prompt, and one more for each request
        that already runs, so that all of them can grow (Scheduler.reserve). This reserve is
        nanovllm's own: vLLM keeps none by default. A block of 256 holds a whole request, so the
        first cache needs no reserve. 24 requests, each with an answer of 10 or 11 tokens:""")
    counts = []
    for size in (256, 16):
        options = dict(num_kv_cache_blocks=1024 // size, max_model_len=256)
        small = make_llm(block_size=size, enable_prefix_caching=False, **options)
        if size == 256:
            small.engine.scheduler.reserve = lambda: 0  # type: ignore[method-assign]
        small.engine.observer = counters = Counters(small)
        ask(small, [f"What is 12 + {i}?\n" for i in range(24)], max_tokens=48)
        running = counters.running
        counts.append((f"{1024 // size} blocks of {size}", max(map(len, running)), len(running)))
    show_table(("cache", "requests at once", "steps"), counts)
    say(f"""With blocks of 16, each prompt takes one block. When the last request begins,
        {(n := counts[1][1])} blocks are taken and {n - 1} are in reserve, which is {2 * n - 1} of
        the 64. A sequence of any length wastes less than one block. All 24 share each step (lesson
        6a), so there are only as many steps as the longest answer has tokens.""")
    show_source(
        link("engine.block_manager.BlockManager.append_block"),
        link("runner.rows.Rows.slots"),
        link("engine.scheduler.Scheduler.reserve"),
    )
    say("""Build it: `python -m lessons build slots`, and then m2, in your engine. The ladder
        still runs one request at a time here, so blocks save only memory: `python -m lessons
        ladder 5`.""")


QUESTIONS = Questions("""
    Blocks have 4 slots. A sequence has the block table [13, 2, 7, 16, 1, 9]. Which slot has the
    token at position 14?
    Answer: 66. Position 14 is in logical block 14 // 4 = 3, which is physical block 16, at offset
    14 % 4 = 2: slot 16 * 4 + 2.
    Hint: Divide 14 by 4. The quotient is the index in the block table, the remainder the offset.

    A cache has 1,024 slots. A request may have up to 256 tokens, and gets contiguous memory for all
    of them when it begins. 24 requests of about 20 tokens arrive together. How many run at once?
    Answer: 4. Each has 256 slots, of which it uses about 20. In blocks of 16 all 24 fit into the
    same memory.
    Hint: How many times do 256 slots fit into the cache?
""")

IN_VLLM = """`KVCacheManager.allocate_slots` in `v1/core/kv_cache_manager.py` takes the blocks, and
`BlockTable.compute_slot_mapping` in `v1/worker/block_table.py` makes slots of them. A request is
admitted if all its known tokens fit (`scheduler_reserve_full_isl`) and what `watermark` says stays
free, which is 0 by default."""
