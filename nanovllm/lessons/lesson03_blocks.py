"""Lesson 3: blocks, block tables, slots.

The KV cache has one place, a slot, for the keys and values of one token. Nobody knows how long an
answer will be, so a contiguous piece of the cache for each request must be as long as the longest
answer. A paged cache is cut into blocks of a few slots, and a sequence takes one when it needs it.
Its block table says which block holds which of its tokens. Paging is from PagedAttention (Kwon et al.
2023, arXiv:2309.06180).

    tokens        [ t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9       ]   logical blocks
    block table   [      1      |      3      |      5      ]   physical blocks
    cache         [ null | t0-t3 |  ..  | t4-t7 |  ..  | t8 t9 ]
    block            0       1      2       3      4       5  t9: slot 5 * 4 + 1
"""

from nanovllm import LLM, SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.lessons.lesson import GREEDY, decode_plan, make_llm, prompt_plan
from nanovllm.lessons.show import Question, link, say, show_source, show_table
from nanovllm.runner.rows import Rows

PROMPT = "What is 12 + 30?\n"


def slots_of_a_sequence(llm: LLM) -> list[int]:
    """Give a sequence blocks, print where its tokens are, and return the slots."""
    tokenizer = llm.get_tokenizer()
    ids: list[int] = tokenizer.encode(PROMPT)
    blocks = BlockManager(num_blocks=8, block_size=4)
    other = Sequence("other", 0, [1, 2], 2, 8, frozenset(), GREEDY)
    seq = Sequence("this", 1, ids, len(ids), 32, frozenset(), GREEDY)
    # Blocks are appended when they are needed, so those of two sequences alternate.
    for _ in range(blocks.num_needed(seq, len(ids))):
        blocks.append_block(seq)
        blocks.append_block(other)
    table, size = seq.block_table, blocks.block_size
    slots = [table[p // size] * size + p % size for p in range(len(ids))]

    print(f"block_table = {table}; that of another sequence = {other.block_table}\n")
    rows = [
        (repr(tokenizer.decode([token])), p, f"{p // size}", table[p // size], p % size, slots[p])
        for p, token in enumerate(ids)
    ]
    head = ("token", "position", "logical block: // 4", "physical block", "offset: % 4", "slot")
    show_table(head, rows)
    return slots


def answer_with(llm: LLM, block_table: list[int], num_tokens: int) -> str:
    """Run the model on plans that are written by hand, as the scheduler would write them."""
    ids = llm.get_tokenizer().encode(PROMPT)
    runner = llm.engine.runner
    output = runner.run(prompt_plan([ids], [block_table]))().token_ids
    for _ in range(num_tokens - 1):
        output += runner.run(decode_plan(1))().token_ids
    return str(llm.get_tokenizer().decode(output))


def most_running(llm: LLM, num_requests: int) -> tuple[int, int]:
    """Run requests in the engine's loop -> the largest number that ran at once, and the steps."""
    engine, most, steps = llm.engine, 0, 0
    for i in range(num_requests):
        engine.add_request(f"What is 12 + {i}?\n", SamplingParams(temperature=0, max_tokens=48))
    while engine.has_unfinished_requests():
        engine.step()
        most, steps = max(most, len(engine.scheduler.running)), steps + 1
    return most, steps


def run() -> list[Question]:
    llm = make_llm(kvcache_block_size=4, num_kvcache_blocks=16)
    say("""A sequence has as many blocks as its tokens need: a prompt takes several at once, and later
        it takes one when its last is full. Here two sequences take blocks of 4 slots in turn. Block 0
        is missing, because it is the null block: padding is written there, and no sequence owns
        it.""")
    slots = slots_of_a_sequence(llm)
    say("""Attention reads keys and values through the block table, so the order of the blocks in
        memory does not matter. To show it, the same prompt is run in two places of the cache. What a
        step computes and where is a StepPlan, which the scheduler makes; these are written by
        hand:""")
    tables = ([1, 2, 3, 4, 5, 6], [13, 2, 7, 16, 1, 9])
    answers = [answer_with(llm, table, 10) for table in tables]
    show_table(("block table", "answer"), zip(map(str, tables), map(repr, answers), strict=True))
    assert answers[0] == answers[1]

    say("""What is gained is memory. Without paging each request would get contiguous memory for 256
        tokens, the most that it may need here. That is the same as one block of 256 slots for each.
        With small blocks it takes what it needs. 24 requests of about 20 tokens, and 1,024 slots:""")
    rows, mosts = [], []
    for size in (256, 16):
        options = dict(num_kvcache_blocks=1024 // size, max_model_len=256)
        small = make_llm(kvcache_block_size=size, enable_prefix_caching=False, **options)
        most, steps = most_running(small, 24)
        rows.append((f"{1024 // size} blocks of {size}", most, steps))
        mosts.append(most)
    show_table(("cache", "requests at once", "steps"), rows)
    say(f"""With 4 large blocks {mosts[0]} requests run at once, because admission leaves one block
        available for each running sequence, so that it can go on (Scheduler.reserve).""")
    show_source(
        link(BlockManager.append_block),
        link(Rows.slots),
        link(BlockManager._take_block),
        link(Scheduler.reserve),
    )
    return [
        Question(
            f"Blocks have 4 slots. A sequence has the block table {tables[1]}. Which slot has the "
            "token at position 9?",
            str(tables[1][9 // 4] * 4 + 9 % 4),
            "Position 9 is in logical block 9 // 4 = 2, which is physical block 7, at offset "
            "9 % 4 = 1: slot 7 * 4 + 1.",
            "Divide 9 by 4. The quotient is the index in the block table, the remainder the offset.",
        ),
        Question(
            f"The prompt above has {len(slots)} tokens. How many slots of its blocks are unused?",
            str(-len(slots) % 4),
            "A sequence wastes less than one block, whatever its length: that is the reason for "
            "small blocks. Large ones make block tables short and reads contiguous.",
            "Blocks of 4 slots: how many does the prompt need, and how many slots do these have?",
        ),
    ]
