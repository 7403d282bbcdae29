"""Lesson 9a: preemption.

Blocks are taken when they are needed, so nobody knows at admission how many a request will take.
All running requests may need a block when none is free, and each would wait for the others forever.
The scheduler then preempts one of them: it loses its row and its blocks, and waits at the head of
the queue. It keeps its tokens, and they are computed again when there is room, as in vLLM (Kwon et
al. 2023, arXiv:2309.06180). What its user has read stays too: the text is kept outside of the
scheduler (lesson 1b). 4 blocks, of which A, the older request, and B have two each:

    blocks     [ A | A | B | B ]      A needs a third block, and none is free
    preempt    [ A | A |   |   ]      B waits with all of its tokens
    A goes on  [ A | A | A |   ]
    A ends     [ B | B | B |   ]      B is computed again, and has a third block
"""

import re

from lessons.lesson import ask, make_llm
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import Trace


def preempt(num_blocks: int, enable_prefix_caching: bool) -> tuple[Trace, list[list[int]], int]:
    """Run two requests -> the trace, their tokens, and how many tokens were computed again."""
    pool = dict(num_kv_cache_blocks=num_blocks, enable_prefix_caching=enable_prefix_caching)
    with Trace(llm := make_llm(block_size=4, **pool)) as trace:
        prompts = ["What is 12 + 30?\n", "Sort 42, 7, 99\n"]
        outputs = ask(llm, prompts, ignore_eos=True, max_tokens=9)
    tokens = [output["token_ids"] for output in outputs]
    return trace, tokens, int(llm.stats()["recomputed_tokens"])


def run() -> None:
    QUESTIONS.show(1)
    runs = {pool: preempt(*pool) for pool in ((32, True), (8, True), (8, False))}
    say("""Two requests in a pool of 8 blocks of 4 slots. In step 8 request 0 needs another block
        and none is free. Request 1, which was admitted last, loses its blocks and returns to the
        head of the queue with its tokens. Both requests sample 9 tokens, whatever they are
        (ignore_eos). A fork, which the trace mentions, is another sample of a request (elective
        `samples`):""")
    before, after = re.split(r"\n(?=  10 )", str(runs[8, True][0]))
    print(before, end="\n\n")
    say("""Step 9 counts its blocks while it runs, so the 5 blocks of request 0, which ends in it,
        are not yet free. They can be taken in step 10.""")
    QUESTIONS.show(2)
    print(after, end="\n\n")
    QUESTIONS.show(3)
    say("""The tokens are the same as in a large pool: to compute known tokens is what a step does
        with every prompt. Request 1 has 17 tokens, and all but the last had been computed. With
        prefix caching, the blocks that it lost stay in the cache until they are evicted. Step 10
        finds positions 0 to 11 there, so 4 tokens are computed again, at positions 12 to 15.
        Position 16 had only been sampled:""")
    assert len({str(tokens) for _, tokens, _ in runs.values()}) == 1
    rows = [(*pool, trace.num_steps, again) for pool, (trace, _, again) in runs.items()]
    show_table(("blocks", "prefix caching", "steps", "tokens computed again"), rows)
    say("""Preemption is the exception, because admission in nanovllm leaves a block available for
        each sequence that runs, which is no rule of vLLM (lesson 5): in step 9 only the 3 cached
        blocks have no owner, and request 1 wants to use them again. It needs 2 more, and 1 has to
        stay available for request 0, so it waits. A step that has preempted a sequence admits none,
        and preempted sequences come before new ones.""")
    show_source(
        link("engine.scheduler.Scheduler._make_room", "self.preempt("),
        link("engine.scheduler.Scheduler.preempt"),
    )
    say("""One case of `preempt` is for beams (elective `beams`): a beam whose next token is not
        chosen yet (`awaits_token`) is not put into the queue.

        Build it: `python -m lessons build preempt`, and then m5, in your engine. Then find a fault:
        `python -m lessons break 16`.""")


QUESTIONS = Questions("""
    A running request needs a block and none is free. Why is the request preempted that was admitted
    last?
    (a) It has the fewest tokens to compute again.
    (b) The oldest request can then always go on.
    (c) Its blocks are not in the prefix cache yet.
    Answer: b. So requests end and free their blocks. If the oldest were preempted, two requests
    could take the blocks from each other without end. A late request can have a long prompt, so it
    need not have the fewest tokens.
    Hint: Which rule guarantees that at least one request ends?

    Who computes what in step 10? Request 1 has 17 tokens, and the cache has the blocks 4, 5 and 6
    with its first 12. How many tokens does it compute?
    Answer: 5. Positions 12 to 16. The first four of them are computed again, and the token at
    position 16 has only been sampled.
    Hint: Which of its positions are in none of the three blocks?

    A request with a prompt of 10 tokens is preempted when it has sampled 4 tokens. The prefix cache
    is off. How many tokens does it compute when it runs again, before it samples the next one?
    Answer: 14. All its tokens are known, and none is in the cache. They are one chunk, like a
    prompt, if the budget suffices. It computes 13 of them again, and the last one, which it has
    only sampled, for the first time.
    Hint: Which of its tokens are known, and for which of them does the cache have keys and values?
""")

IN_VLLM = """`Scheduler._preempt_request` in `v1/core/sched/scheduler.py` does the same: no block is
copied, and all tokens are computed again. There is no reserve at admission (lesson 5), unless
`watermark` is set."""
