"""Lesson 6a: continuous batching.

A step of 4 rows takes much less than 4 times as long as a step of one (lesson 4), and lesson 5 has
the memory for them. So an engine computes the next tokens of several requests, a batch, in one
step. Each request of the batch has a row, and max_num_seqs is the number of rows. But requests do
not end together. A static batch runs until its last request has ended, and the rows of the others
are idle. With continuous batching a waiting request takes a row once one is free (Orca, OSDI 2022).

             static batches    continuous batching
    row 0    A A . . C C C     A A C C C      a letter: a step; A takes 2
    row 1    B B B B D . .     B B B B D      .: the row is idle
"""

from collections.abc import Sequence

from lessons.lesson import Counters, make_llm
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, SamplingParams

ROWS = 4  # max_num_seqs
LENGTHS = (2, 9, 3, 2, 8, 2, 3, 3)  # output tokens of the requests


def serve(llm: LLM, lengths: Sequence[int], size: int) -> tuple[list[list[int]], list[str]]:
    """Run requests with these numbers of output tokens, in groups of `size`.

    Returns their tokens, and a line for each request, with an x for each step in which it computes.
    """
    llm.engine.observer = counters = Counters(llm)
    tokens = []
    for first in range(0, len(lengths), size):
        group = lengths[first : first + size]
        prompts = [f"What is 12 + {first + i}?\n" for i in range(len(group))]
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=n) for n in group]
        tokens += [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
    names = dict.fromkeys(name for step in counters.running for name in step)
    signs = [["x" if name in step else "." for step in counters.running] for name in names]
    return tokens, ["".join(line) for line in signs]


def run() -> None:
    llm = make_llm(num_kv_cache_blocks=64, max_num_seqs=ROWS)
    QUESTIONS.show(1, 2)
    say(f"""Eight requests and {ROWS} rows. An x is a step in which the request computes: the first
        computes its prompt, and each samples a token.""")
    rows, runs, begins = [], [], []
    for name, size in (("static batches", ROWS), ("continuous batching", len(LENGTHS))):
        tokens, lines = serve(llm, LENGTHS, size)
        print(name, *(f"  request {i}  {line}" for i, line in enumerate(lines)), "", sep="\n")
        rows.append((name, len(lines[0]), ROWS * len(lines[0]) - sum(LENGTHS)))
        runs.append(tokens)
        begins.append(1 + lines[4].index("x"))
    assert runs[0] == runs[1]
    say(f"""Both give the same {sum(LENGTHS)} output tokens, in {rows[0][1]} and in {rows[1][1]}
        steps. Request 4 begins in step {begins[0]} with static batches, and in step {begins[1]}
        with continuous batching. A step with more rows takes a little longer.""")
    show_table(("", "steps", "idle rows, summed over the steps"), rows)
    show_source(
        link("engine.scheduler.Scheduler._admit", "self.max_num_seqs"),
        link("engine.scheduler.Scheduler.leave", "free_rows.append"),
    )
    say("""What to do: find a list of eight lengths (LENGTHS in `lessons/lesson06a_batching.py`) for
        which both ways take the same number of steps, and one for which continuous batching takes a
        little more than half as many. On the ladder these are two rungs: `python -m lessons ladder
        6`.""")


QUESTIONS = Questions("""
    Four requests with 2, 9, 3 and 2 output tokens run in four rows, and a fifth one waits. After
    how many steps does it begin with static batches, and with continuous batching?
    (a) After 9 and after 9. (b) After 9 and after 2. (c) After 16 and after 2.
    Answer: b. A static batch runs until its longest request has ended, although two rows are idle
    from the third step on. With continuous batching the fifth request takes one of these two.
    Hint: Which rows are free after two steps, and who may take them?

    Eight requests have 5 output tokens each, and there are four rows. Why does continuous batching
    save no step here?
    (a) All rows become free in the same step.
    (b) There are more requests than rows.
    (c) Five tokens are too few to save a step.
    Answer: a. So no row is idle in static batches either. Continuous batching gains if the lengths
    of outputs differ, as in real requests.
    Hint: In which steps is a row of a static batch idle, if all its requests are equally long?
""")

IN_VLLM = """`Scheduler.schedule` in `v1/core/sched/scheduler.py` admits in the same way. In the
model runner V1 the last row moves to one that becomes free (`InputBatch.condense` in
`v1/worker/gpu_input_batch.py`). In V2 each request keeps its row, as here (`RequestState` in
`v1/worker/gpu/states.py`)."""
