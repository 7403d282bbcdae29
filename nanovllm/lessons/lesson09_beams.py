"""Lesson 9: beams are forks.

Greedy sampling takes the most likely token in each step, but the most likely output may begin with
a less likely token. A beam search keeps the `beam_width` best beginnings, its beams. In each step
every beam yields its most likely next tokens, its candidates, and the best of all candidates
continue. A beam with two chosen candidates is forked, and one with none ends.

    step 1    step 2      step 3
    a  ---->  a b  --->   a b c     each line is a sequence with a block table
         `->  a d         (ends)    a fork shares the blocks of its parent, and
    e  ---->  e f  --->   e f g     copies the last one before it writes into it
                  `--->   e f h

The search works on sequences of the scheduler and needs no separate cache. Forks, copy-on-write and
preemption work as in lessons 6 and 7.
"""

import math

from nanovllm import LLM, BeamSearchParams, Trace
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.features.beam_search import BeamSearch, BeamSearchSequence
from nanovllm.lessons.lesson import ask, make_llm
from nanovllm.lessons.show import Question, link, say, show_source, show_table
from nanovllm.tools.trace.trace import State

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


def run() -> list[Question]:
    llm = make_llm(attention_backend="sdpa", kvcache_block_size=4, num_kvcache_blocks=64)
    prompt = llm.get_tokenizer().encode(PROMPT)
    trace, beams = search(llm, WIDTH)
    say(f"""A search with beam_width={WIDTH} continues {PROMPT!r} by {LENGTH} tokens. The first step
        computes the prompt once, for all beams. In each step that follows, the last token of each
        beam is computed. Blocks have 4 slots, and the prompt has {len(prompt)} tokens:""")
    show_steps(llm, trace)
    say("The results, compared with greedy sampling:")
    greedy = ask(llm, [PROMPT], max_tokens=LENGTH, ignore_eos=True, logprobs=0)[0].outputs[0]
    outputs = [("greedy", greedy.token_ids, greedy.cumulative_logprob or 0.0)]
    outputs += [
        (f"beam {i}", beam.tokens[len(prompt) :], beam.cum_logprob)
        for i, beam in enumerate(beams, 1)
    ]
    decode = llm.get_tokenizer().decode
    rows = [(name, repr(decode(ids)), f"{logprob:.3f}") for name, ids, logprob in outputs]
    show_table(("", "output", "log-probability"), rows)
    factor = math.exp(outputs[1][2] - outputs[0][2])
    say(f"The best beam is {factor:.2f} times as likely as the greedy output.")
    show_source(
        link(BeamSearch._choose, "ranked = sorted"),
        link(BeamSearch._continue, "self.scheduler.fork"),
        link(Scheduler.fork, "self.block_manager.fork"),
        link(BlockManager.copy_on_write),
    )
    one = search(llm, 1)[1][0].tokens[len(prompt) :]
    max_sequences = max(
        len(event.get("decodes", ())) + len(event.get("chunks", ())) for event in trace.events
    )
    return [
        Question(
            "Is the output of a search with beam_width=1 the greedy output: yes or no?",
            "yes" if one == greedy.token_ids else "no",
            "One beam keeps the best candidate of each step, which is the most likely token.",
            "Which candidate does the only beam keep in each step?",
        ),
        Question(
            f"How many sequences does a step of the search above compute at most, with "
            f"beam_width={WIDTH}?",
            str(max_sequences),
            "One for each beam. Candidates are not sequences: the row of the beam computes them.",
            "Count the lines of a step in the first table.",
        ),
    ]
