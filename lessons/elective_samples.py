"""Elective samples: several outputs of one prompt, and copy-on-write.

Two prompts with a common prefix share full blocks (lesson 8). Two samples of the same prompt (n=2)
have more in common: the whole prompt, also its last block, which is not full. But both write their
first output token into this block. A prompt of 10 tokens in blocks of 4 slots:

    sample 0   [ t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 a ]   block table  1 2 4
    sample 1   [ t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 b ]   block table  1 2 3
                 1: shared     2: shared     3: copied to 4 before a is written

An operating system does the same after a fork (Kwon et al. 2023, arXiv:2309.06180): who
writes into a block that has several owners copies it first.
"""

from lessons.lesson import ask, make_llm
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, Trace

PROMPT = "What is 12 + 30?\n"


def trace_samples(llm: LLM, n: int) -> tuple[Trace, int]:
    """Sample PROMPT `n` times -> the trace, and how many blocks were copied."""
    with Trace(llm) as trace:
        ask(llm, [PROMPT], n=n, temperature=4, seed=1, max_tokens=3)
    return trace, sum(len(event.get("copies", ())) for event in trace.events)


def run() -> None:
    llm = make_llm(block_size=4, num_kv_cache_blocks=32)
    QUESTIONS.show(1)
    say("""Two samples are drawn at a high temperature: sequences 0.0 and 0.1 of request 0. Sequence
        0.1 is forked when 0.0 has its first token. It computes the last prompt token again, to
        sample from its logits:""")
    print(trace_samples(llm, 2)[0], end="\n\n")
    rows = [(n, trace_samples(llm, n)[1]) for n in (1, 2, 4, 8)]
    show_table(("samples", "blocks copied"), rows)
    QUESTIONS.show(2)
    show_source(
        link("engine.result_kinds.fork", "block_manager.fork"),
        link("engine.block_manager.BlockManager.copy_on_write"),
    )
    say("What to do: find the fault of `python -m lessons break 9`.")


QUESTIONS = Questions("""
    If two samples of a prompt are drawn, its last block, which is not full, is copied once. How
    many copies are made for four samples?
    Answer: 3. Each of the four samples writes into this block, and one of them keeps the original.
    Hint: How many samples write into the block, and who may keep the original?

    A prompt has 8 tokens, which fill two blocks of 4 slots. How many copies are made for four
    samples?
    Answer: 3. Each fork computes the last prompt token again, and stores its key and value in the
    last block of the prompt. So each fork copies this block, although it is full.
    Hint: Which token does sequence 0.1 compute first in the trace, and where does it store it?
""")

IN_VLLM = """`ParentRequest` in `v1/engine/parallel_sampling.py`: parallel sampling is n requests,
which share full blocks through the prefix cache. There are no forks: each computes the last block
of the prompt."""
