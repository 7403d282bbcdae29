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
from nanovllm import BeamSearchParams, Trace

PROMPT = "How does "
WIDTH, LENGTH = 3, 5


def run() -> None:
    llm = make_llm(attention_backend="sdpa", block_size=4, num_kv_cache_blocks=64)
    prompt = llm.get_tokenizer().encode(PROMPT)
    decode = llm.get_tokenizer().decode
    params = BeamSearchParams(WIDTH, LENGTH, ignore_eos=True)
    with Trace(llm) as trace:
        [output] = llm.beam_search(PROMPT, params, use_tqdm=False)
    QUESTIONS.show(1)
    say(f"""A search with beam_width={WIDTH} continues {PROMPT!r} by {LENGTH} tokens. The first step
        computes the prompt once, for all beams. In each step that follows, the last token of each
        beam is computed. A number in parentheses is the log-probability of a beam so far. A beam
        without a token is one of which no candidate was chosen. The columns free, cached and shared
        count blocks while a step runs (lesson 8):""")
    print(trace, end="\n\n")
    say("""After step 2, two of the three best candidates continue 0.0, so it is forked. None
        continues 0.2, which is dropped. In step 4 all block tables begin with block 2: what the
        beams have in common is stored once.""")
    QUESTIONS.show(2)
    say("The results, compared with greedy sampling:")
    greedy = ask(llm, [PROMPT], max_tokens=LENGTH, ignore_eos=True, logprobs=0)[0].outputs[0]
    outputs = [("greedy", greedy.token_ids, greedy.cumulative_logprob or 0.0)]
    for i, beam in enumerate(output.sequences, 1):
        outputs.append((f"beam {i}", beam.tokens[len(prompt) :], beam.cum_logprob))
    rows = [(name, repr(decode(ids)), f"{logprob:.3f}") for name, ids, logprob in outputs]
    show_table(("", "output", "log-probability"), rows)
    factor = math.exp(outputs[1][2] - outputs[0][2])
    say(f"The best beam is {factor:.2f} times as likely as the greedy output.")
    show_source(
        link("features.tasks.beam_search.BeamSearch._choose", "ranked = sorted"),
        link("features.tasks.beam_search.BeamSearch._continue", "result_kinds.fork"),
    )


QUESTIONS = Questions("""
    A beam is forked. Why is its last block copied, but none of its full blocks?
    (a) The prefix cache has a copy of each full block.
    (b) A full block is too large to copy in each step.
    (c) The beams write their next tokens only into the last.
    Answer: c. They will write different tokens into it. Tokens that are computed do not change, so
    beams can read the same full blocks.
    Hint: Into which blocks do the two beams write their next tokens?

    Is the output of a search with beam_width=1 the greedy output: yes or no? And why?
    Answer: yes. One beam keeps the best candidate of each step, which is the most likely token. A
    larger width also keeps beginnings that are worse so far.
    Hint: Which candidate does the only beam keep in each step?
""")

IN_VLLM = """`BeamSearchOfflineMixin.beam_search` in `entrypoints/generate/beam_search/offline.py`
runs outside of the engine: in each step every beam is a new request for one token, which finds the
blocks of the beam in the prefix cache."""
