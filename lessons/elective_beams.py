"""Elective beams: beams are forks.

Greedy sampling takes the most likely token in each step, but the most likely output may begin with
a less likely token: 0.6 * 0.3 is less than 0.4 * 0.9. A beam search keeps the `beam_width` best
beginnings, its beams. In each step every beam yields its most likely next tokens, its candidates,
and the best of all candidates continue. A beam with two chosen candidates is forked, and one with
none ends.

    step 1    step 2      step 3
    a  ---->  a b  --->   a b c     each line is a sequence with a block table
         `->  a d         (ends)    a fork shares the blocks of its parent, and
    e  ---->  e f  --->   e f g     copies the last one before it writes into it
                  `--->   e f h

The search works on sequences of the scheduler. Forks and copies are explained in `samples`.
"""

import math

from lessons.lesson import ask, make_llm
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, BeamSearchParams, Trace
from nanovllm.cli.trace.trace import State
from nanovllm.features.requests.beam_search import BeamSearchSequence

PROMPT = "How does "
WIDTH, LENGTH = 3, 5


def search(llm: LLM, beam_width: int) -> tuple[Trace, list[BeamSearchSequence]]:
    params = BeamSearchParams(beam_width, LENGTH, ignore_eos=True)
    llm.reset_prefix_cache()
    with Trace(llm) as trace:
        sequences = llm.beam_search(PROMPT, params, use_tqdm=False)[0].sequences
    return trace, sequences


def show_steps(llm: LLM, trace: Trace) -> None:
    """Print the beams of each step when it is planned, and what they hold at the end."""
    state, rows, copies = State(), list[tuple[object, ...]](), 0
    for event in trace.events:
        state.apply(event)
        moves, seqs = event.get("copies", []), [state.seqs[i] for i in state.running]
        copies += len(moves)
        for i, seq in enumerate(seqs if "plan" in event else ()):
            text = llm.get_tokenizer().decode(seq.tokens[seq.num_prompt :])
            copied = " ".join(f"{a} to {b}" for a, b in moves if b == seq.table[-1])
            table = " ".join(map(str, seq.table))
            rows.append(("" if i else event["plan"], repr(text), table, copied))
            tables = [list(seq.table) for seq in seqs]
    show_table(("step", "output so far", "block table", "copied"), rows)
    entries, blocks = sum(map(len, tables)), len({block for table in tables for block in table})
    say(f"""In the last step the block tables have {entries} entries and {blocks} different blocks:
        what beams have in common is stored once. {copies} blocks were copied in all.""")


def run() -> None:
    llm = make_llm(attention_backend="sdpa", block_size=4, num_kv_cache_blocks=64)
    prompt = llm.get_tokenizer().encode(PROMPT)
    trace, beams = search(llm, WIDTH)
    QUESTIONS.show(1)
    say(f"""A search with beam_width={WIDTH} continues {PROMPT!r} by {LENGTH} tokens. The first step
        computes the prompt once, for all beams. In each step that follows, the last token of each
        beam is computed. Blocks have 4 slots, and the prompt has {len(prompt)} tokens:""")
    show_steps(llm, trace)
    QUESTIONS.show(2)
    say("The results, compared with greedy sampling:")
    greedy = ask(llm, [PROMPT], max_tokens=LENGTH, ignore_eos=True, logprobs=0)[0].outputs[0]
    outputs = [("greedy", greedy.token_ids, greedy.cumulative_logprob or 0.0)]
    for i, beam in enumerate(beams, 1):
        outputs.append((f"beam {i}", beam.tokens[len(prompt) :], beam.cum_logprob))
    decode = llm.get_tokenizer().decode
    rows = [(name, repr(decode(ids)), f"{logprob:.3f}") for name, ids, logprob in outputs]
    show_table(("", "output", "log-probability"), rows)
    factor = math.exp(outputs[1][2] - outputs[0][2])
    say(f"The best beam is {factor:.2f} times as likely as the greedy output.")
    show_source(
        link("features.requests.beam_search.BeamSearch._choose", "ranked = sorted"),
        link("features.requests.beam_search.BeamSearch._continue", "result_kinds.fork"),
        link("engine.result_kinds.fork", "block_manager.fork"),
    )


QUESTIONS = Questions("""
    A beam is forked. Why is its last block copied, but none of its full blocks? (a) Full blocks are
    in the prefix cache, which has a copy. (b) Full blocks are too large to copy in every step. (c)
    Both beams will write different tokens into the last block, and nobody writes into the others.
    Answer: c. Tokens that are computed do not change, so beams can read the same full blocks.
    Hint: Into which blocks do the two beams write their next tokens?

    Is the output of a search with beam_width=1 the greedy output: yes or no? And why?
    Answer: yes. One beam keeps the best candidate of each step, which is the most likely token. A
    larger width also keeps beginnings that are worse so far.
    Hint: Which candidate does the only beam keep in each step?
""")
