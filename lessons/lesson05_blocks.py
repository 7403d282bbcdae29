"""Lesson 5: blocks, block tables, slots.

Lesson 3 reserved a slot, the place of one token's keys and values, for each token that a request
may ever have. The length of an answer is not known in advance, so most slots stay empty: a request
of 20 tokens that may have 256 wastes 236. A paged cache is divided into blocks of a few slots, and
a sequence takes a block when it needs one. Its block table says which block holds which of its
tokens. Paging is from PagedAttention (Kwon et al. 2023, arXiv:2309.06180). Here t9, at position 9,
is in the logical block 9 // 4 = 2, at the offset 9 % 4 = 1:

    tokens        [ t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9       ]   logical blocks
    block table   [      1      |      3      |      5      ]   physical blocks
    cache         [ null | t0-t3 |  ..  | t4-t7 |  ..  | t8 t9 ]
    block            0       1      2       3      4       5  t9: slot 5 * 4 + 1
"""

from lessons.lesson import GREEDY, decode_plan, make_llm, prompt_plan
from lessons.pictures import show_lanes
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.runner.rows import Rows

PROMPT = "What is 12 + 30?\n"


def slots_of_a_sequence(llm: LLM) -> list[int]:
    """Give a sequence blocks, print where its tokens are, and return the slots."""
    ids: list[int] = llm.get_tokenizer().encode(PROMPT)
    texts = [repr(llm.get_tokenizer().decode([token])) for token in ids]
    blocks, size = BlockManager(num_blocks=8, block_size=4), 4
    other = Sequence("other", 0, [1, 2], 2, 8, frozenset(), GREEDY)
    seq = Sequence("this", 1, ids, len(ids), 32, frozenset(), GREEDY)
    # Blocks are appended when they are needed, so the blocks of the two sequences alternate.
    for _ in range(blocks.num_needed(seq, len(ids))):
        blocks.append_block(seq)
        blocks.append_block(other)
    table = seq.block_table
    slots = [table[p // size] * size + p % size for p in range(len(ids))]

    print(f"block_table = {table}; of another sequence: {other.block_table}\n")
    rows = [
        (text, p, p // size, table[p // size], p % size, slots[p]) for p, text in enumerate(texts)
    ]
    head = ("token", "position", "logical block: // 4", "physical block", "offset: % 4", "slot")
    show_table(head, rows)
    held = dict(zip(slots, texts, strict=True))
    colors = dict.fromkeys(table, 1) | dict.fromkeys(other.block_table, 2)
    lanes = []
    for b in range(8):
        cells = [(o, f"slot {s} {held.get(s, '')}") for o, s in enumerate(range(b * 4, b * 4 + 4))]
        lanes.append((f"block {b}", [(o, 1, text, colors.get(b, 0)) for o, text in cells]))
    show_lanes("The KV cache", lanes, this_sequence=1, another_sequence=2, not_owned=0)
    return slots


def answer_with(llm: LLM, block_table: list[int], num_tokens: int) -> str:
    """Run the model on plans written by hand, like the plans of the scheduler."""
    ids = llm.get_tokenizer().encode(PROMPT)
    runner = llm.engine.runner
    output = runner.run(prompt_plan([ids], [block_table]))().token_ids
    for _ in range(num_tokens - 1):
        output += runner.run(decode_plan(1))().token_ids
    return str(llm.get_tokenizer().decode(output))


def count_running(llm: LLM, num_requests: int) -> tuple[int, int]:
    """Run requests in the engine's loop -> the largest number that ran at once, and the steps."""
    engine, running = llm.engine, list[int]()
    for i in range(num_requests):
        engine.add_request(f"What is 12 + {i}?\n", SamplingParams(temperature=0, max_tokens=48))
    while engine.has_unfinished_requests():
        engine.step()
        running.append(len(engine.scheduler.running))
    return max(running), len(running)


def run() -> None:
    llm = make_llm(block_size=4, num_kv_cache_blocks=16)
    say("""A sequence takes all blocks of its prompt at once. Later it takes one more block when its
        last block is full. Here two sequences take blocks of 4 slots in turn. Block 0 is the
        null block: padding is written there, and no sequence owns it.""")
    QUESTIONS.show(1)
    slots_of_a_sequence(llm)
    say("""Attention reads keys and values through the block table, so the order of the blocks in
        memory does not matter. To show this, the same prompt runs in two places of the cache, by
        plans that are written by hand. (A StepPlan says what a step computes, and in which blocks.
        In the engine the scheduler makes it.)""")
    tables = ([1, 2, 3, 4, 5, 6], [13, 2, 7, 16, 1, 9])
    answers = [answer_with(llm, table, 10) for table in tables]
    show_table(("block table", "answer"), zip(map(str, tables), map(repr, answers), strict=True))
    assert answers[0] == answers[1]

    QUESTIONS.show(2)
    say("""Paging saves memory. Without it each request would get contiguous memory for the 256
        tokens that it may need here, which is the same as one block of 256 slots. 24 requests of
        about 20 tokens, prompt and output, and 1,024 slots:""")
    rows, max_running = [], []
    for size in (256, 16):
        options = dict(num_kv_cache_blocks=1024 // size, max_model_len=256)
        small = make_llm(block_size=size, enable_prefix_caching=False, **options)
        if size == 256:  # contiguous memory is never extended, so it needs no reserve
            small.engine.scheduler.reserve = lambda: 0  # type: ignore[method-assign]
        running, steps = count_running(small, 24)
        rows.append((f"{1024 // size} blocks of {size}", running, steps))
        max_running.append(running)
    show_table(("cache", "requests at once", "steps"), rows)
    say(f"""With 4 large blocks, {max_running[0]} requests run at once, and each has one block. With
        small blocks all {max_running[1]} run at once. At admission each takes one block for its
        prompt, and one more must stay available for each that runs (Scheduler.reserve):
        {2 * max_running[1]} of 64 blocks.""")
    show_source(link(BlockManager.append_block), link(Rows.slots), link(Scheduler.reserve))
    say("Build it: `python -m lessons build slots`.")


QUESTIONS = Questions("""
    Blocks have 4 slots. A sequence has the block table [13, 2, 7, 16, 1, 9]. Which slot has the
    token at position 9?
    Answer: 29. Position 9 is in logical block 9 // 4 = 2, which is physical block 7, at offset 9 %
    4 = 1: slot 7 * 4 + 1.
    Hint: Divide 9 by 4. The quotient is the index in the block table, the remainder the offset.

    Two caches have 1,024 slots, one in blocks of 256, the other in blocks of 16. Why can more
    requests run at once with the small blocks?
    (a) A request takes the slots that its tokens need so far, and not those that it may need.
    (b) Small blocks are read faster.
    (c) Several sequences write into the same block.
    Answer: a. A sequence of any length wastes less than one block. Large blocks make block tables
    short and reads contiguous, so a block is not a single slot either.
    Hint: How many slots does a request of 20 tokens occupy in each of the two caches?
""")
